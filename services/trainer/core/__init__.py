"""The core of a training gang: its life, its sleep and its recovery. Open `core.py` first."""
