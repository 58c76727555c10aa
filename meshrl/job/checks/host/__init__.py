"""Checks of all that can be known before a mesh starts. Open `all_checks.py` first."""
