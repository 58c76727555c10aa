"""Entry of a child process: its limits, its guard. Open `child.py` first."""
