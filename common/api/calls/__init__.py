"""Methods, and the roles that may call them. Open `interface.py` first."""
