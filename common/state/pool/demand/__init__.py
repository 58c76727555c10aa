"""Demand of the jobs for workers. Open `needs.py` first."""
