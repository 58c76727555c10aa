"""Arithmetic of a core on one process or several. Open `gang_compute.py` first."""
