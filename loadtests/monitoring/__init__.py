"""Makes each alert of compose/monitoring fire on a real mesh, and clear. Open `mesh.py` first."""
