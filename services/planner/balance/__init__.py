"""Which workers of a job roll out and which train: predicted, decided, judged. Open
`rebalancing.py` first.
"""
