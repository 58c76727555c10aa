"""Faults of a virtual mesh, and the checks of what is left after them. Open `faults.py` first."""
