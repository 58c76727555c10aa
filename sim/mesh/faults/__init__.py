"""Faults of a virtual mesh, and the checks of what is left after them. Open `fault_schedule.py`
first.
"""
