"""Metrics of a mesh as a whole. Open `mesh_gauges.py` first."""
