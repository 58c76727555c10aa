"""Policies of the planner, one question each. `decision.py` calls them in order: open it first."""
