"""What generating and training take, in seconds, before anybody has measured it (Libra's Cost
Evaluator, arXiv 2606.03077), and how measurements correct it. Open `rollout_costs.py` first.
"""
