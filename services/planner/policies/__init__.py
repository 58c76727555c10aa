"""What the planner decides by, a question each. `decide.py` asks them in order: open it first."""
