"""The terms of a loss that algorithms are put together from. Open `objective.py` first."""
