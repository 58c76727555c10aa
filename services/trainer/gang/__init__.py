"""The arithmetic of a core, on one process or several. Open `compute.py` first."""
