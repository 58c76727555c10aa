"""A virtual mesh from its start to its end, without anything that fails. Open `world.py` first."""
