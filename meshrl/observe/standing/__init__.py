"""How a mesh and its jobs stand, and what is wrong with them. Open `pool.py` first."""
