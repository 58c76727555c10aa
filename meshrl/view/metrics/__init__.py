"""The figures of a mesh as a whole, as metrics. Open `mesh_gauges.py` first."""
