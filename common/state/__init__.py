"""What the mesh knows in common, in Redis, a module for each kind of row. Open `client.py`
first."""
