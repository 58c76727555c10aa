"""The plain loop that the mesh is measured against. Open `loop.py` first."""
