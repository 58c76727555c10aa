"""Sequences in bins, bins in rounds, and rounds among ranks. Open `packing.py` first."""
