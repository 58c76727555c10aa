"""Redis of a mesh, as its launcher starts, watches and checks it. Open `mesh_redis.py` first."""
