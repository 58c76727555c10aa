"""Balance between rollout and training workers of a job: predicted, decided and judged. Open
`rebalancing.py` first.
"""
