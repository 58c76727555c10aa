"""What the planner decides by, a question each. `decision.py` asks them in order: open it first."""
