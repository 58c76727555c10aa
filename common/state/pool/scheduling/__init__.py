"""Snapshot of the pool, and the decisions on it. Open `snapshot.py` first."""
