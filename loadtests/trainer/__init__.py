"""The trainer beside others. Open `elastic.py` first."""
