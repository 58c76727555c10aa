"""Messages as bytes, and bytes in bulk. Open `frames.py` first."""
