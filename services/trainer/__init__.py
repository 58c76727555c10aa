"""The training program: core, further ranks, and hybrids that help. Open `core/core.py` first."""
