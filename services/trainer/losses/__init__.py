"""The terms of a loss, from which algorithms are put together. Open `terms.py` first."""
