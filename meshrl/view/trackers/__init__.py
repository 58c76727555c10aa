"""Trackers of a run's figures, each in a process of its own. Open `tracker_processes.py` first."""
