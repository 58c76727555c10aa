"""Scenarios of simulated clusters: of a file, and of a run that was. Open `scenario.py` first."""
