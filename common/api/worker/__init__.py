"""Messages between a worker and the role processes that it starts. Open `turns.py` first."""
