"""Processes as forks of one that has imported what they need. Open `nursery.py` first."""
