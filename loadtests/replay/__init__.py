"""Runs whose trainer dies and repeats steps. Open `runs.py` first."""
