"""Meters of a running jail: time, CPU time, memory, refused calls. Open `watch.py` first."""
