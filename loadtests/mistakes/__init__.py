"""Mistakes that users make, tried on real meshes. Open `mistake.py` first."""
