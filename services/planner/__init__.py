"""The planner program, which decides who computes what where. Open `planner.py` first."""
