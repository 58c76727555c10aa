"""Handshakes of the bulk port. Open `handshake.py` first."""
