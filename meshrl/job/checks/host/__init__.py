"""Checks on this host before a mesh starts. Open `all_checks.py` first."""
