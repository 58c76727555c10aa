"""Training program: core, further ranks, and hybrids. Open `core/core.py` first."""
