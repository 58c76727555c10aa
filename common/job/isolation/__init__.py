"""Isolation of a job's sandboxes: tiers, runners, images. Open `tiers.py` first."""
