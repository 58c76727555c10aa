"""The built-in engine beside other generators. Open `contestants.py` first."""
