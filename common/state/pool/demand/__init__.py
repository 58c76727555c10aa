"""Demand of the jobs for workers. Open `requirements.py` first."""
