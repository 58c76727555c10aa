"""How a process ended, and what a person can do about it. Open `failure.py` first."""
