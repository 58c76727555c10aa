"""Causes of a process's exit, and advice to the user. Open `failure.py` first."""
