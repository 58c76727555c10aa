"""Regret of the planner's moves against every static split. Open `__main__.py` first."""
