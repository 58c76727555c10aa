"""Random checkpoints of all supported kinds. Open `drawn.py` first."""
