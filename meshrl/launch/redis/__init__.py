"""The Redis of a mesh, as its launcher starts, watches and checks it; `server.py` first."""
