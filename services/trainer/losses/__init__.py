"""The terms of a loss, from which algorithms are put together. Open `objective.py` first."""
