"""The Redis of a mesh, as its launcher starts, watches and checks it; `mesh_redis.py` first."""
