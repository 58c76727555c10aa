"""Faults of a virtual mesh, and checks of the final state. Open `fault_schedule.py` first."""
