"""Bounds of a process's output. Open `streams.py` first."""
