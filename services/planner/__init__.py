"""Decides what each gang of workers does. Open `planner.py` first."""
