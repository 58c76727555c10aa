"""The residents of one worker: their processes, tiers, budgets and turns.
Open `worker_instances.py` first.
"""
