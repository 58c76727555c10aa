"""The planner program, which decides what each gang of workers does. Open `planner.py` first."""
