"""Keeping children running: supervisors, their budgets, leases. Open `supervisor.py` first."""
