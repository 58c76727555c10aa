"""A core's life: groups in, steps committed, checkpoints, recovery. Open `core.py` first."""
