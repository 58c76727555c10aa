"""Meters of a running jail: time, CPU time, memory, denied calls. Open `watch.py` first."""
