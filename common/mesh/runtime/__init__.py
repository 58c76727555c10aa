"""Actors and the calls between them. Open `mesh.py` first."""
