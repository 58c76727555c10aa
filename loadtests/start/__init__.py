"""Starts of processes, and orphans. Open `roles.py` first."""
