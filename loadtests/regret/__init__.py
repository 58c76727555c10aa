"""Whether the planner's moves pay, against every split that stays. Open `__main__.py` first."""
