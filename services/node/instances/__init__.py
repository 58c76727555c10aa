"""Instances of one worker: processes, tiers, budgets and time slices. Open `worker_instances.py`
first.
"""
