"""The shared state of the mesh in Redis, a module for each kind of row. Open `client.py` first."""
