"""Starts of processes, and what they leave. Open `roles.py` first."""
