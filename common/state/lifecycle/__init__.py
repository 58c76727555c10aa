"""A job as a whole, from whether it fits to its deletion. Open `following.py` first."""
