"""Checks of all that can be known before a mesh starts. Open `checks.py` first."""
