"""Messages about bytes that travel in bulk. Open `bulk.py` first."""
