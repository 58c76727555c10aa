"""Frames, which carry calls between processes. Open `frames.py` first."""
