"""Supervision of child processes: supervisors, their budgets, leases. Open `supervisor.py`
first.
"""
