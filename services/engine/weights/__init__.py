"""Weights of an engine: reception, merging and installation. Open `engine_weights.py` first."""
