"""Writes what happens to a job down, for as long as it runs. Open `recorder.py` first."""
