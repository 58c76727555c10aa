"""Bounds of what a process prints. Open `streams.py` first."""
