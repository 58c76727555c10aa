"""Cost model of generation and training in seconds, before any measurement (Libra's Cost Evaluator,
arXiv 2606.03077). Measurements correct it. Open `rollout_costs.py` first.
"""
