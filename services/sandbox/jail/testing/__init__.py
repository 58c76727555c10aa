"""Runs tests in a jail of their own. Open `running.py` first."""
