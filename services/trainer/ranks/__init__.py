"""Ranks beside the first, and the actor that executes rank 0's orders. Open `rank.py` first."""
