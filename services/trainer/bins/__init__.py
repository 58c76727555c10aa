"""Packing of sequences into bins and rounds, and their division. Open `packing.py` first."""
