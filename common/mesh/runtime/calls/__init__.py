"""Calls and streams between actors: both halves, and what they share. Open `caller.py` first."""
