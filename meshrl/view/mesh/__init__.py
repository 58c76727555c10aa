"""Snapshot of a mesh: its rows, and the diagnoses from them. Open `mesh_snapshot.py` first."""
