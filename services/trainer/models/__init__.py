"""Models of a trainer: passes, critic, adapters, copies. Open `forward.py` first."""
