"""Core of a training gang: its life cycle, sleep and recovery. Open `core.py` first."""
