"""Planner service, which decides the role and the job of each worker. Open `planner.py` first."""
