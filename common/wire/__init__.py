"""Messages as bytes, and the transfer of bytes in bulk. Open `frames.py` first."""
