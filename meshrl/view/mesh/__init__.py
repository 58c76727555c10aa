"""A mesh at one moment: its rows, and what follows from them. Open `mesh_snapshot.py` first."""
