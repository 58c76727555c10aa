"""Job files: read, checked and packed. Open `jobfile.py` first, then `checks`."""
