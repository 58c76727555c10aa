"""Durable files that come back wrong. Open `files.py` first."""
