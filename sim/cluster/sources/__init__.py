"""Scenarios of simulated clusters: of a file, and of a recorded run. Open `scenario.py` first."""
