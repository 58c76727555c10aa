"""Faults of a running mesh. Open `faults.py` first."""
