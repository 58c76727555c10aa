"""Durable output of a core: versions and checkpoints. Open `publishing.py` first."""
