"""Backends of the built-in engine, which compute a step. Open `graphs.py` first."""
