"""Actors, their calls, and the processes in which they run. Open `runtime/mesh.py` first."""
