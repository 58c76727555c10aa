"""Processes that run a job's trusted tools and rewards. Open `pool.py` first."""
