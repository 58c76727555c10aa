"""The reward `math`. Open `maths.py` first."""
