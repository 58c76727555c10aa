"""The residents of one worker: their processes, tiers, budgets and turns. Open `residents.py`
first.
"""
