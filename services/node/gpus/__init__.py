"""Accelerators of a host, with their health and free memory. Open `accelerators.py` first."""
