"""Messages about bytes that travel in bulk. Open `bulk_permissions.py` first."""
