"""Pieces of a core's arithmetic. Open `piece_runner.py` first."""
