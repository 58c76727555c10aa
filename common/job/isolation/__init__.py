"""Isolation of a job's sandboxes: tiers, runners, images. Open `isolation.py` first."""
