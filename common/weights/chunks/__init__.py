"""Chunks in files, by digest. Open `chunks.py` first."""
