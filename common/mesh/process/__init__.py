"""Processes of one host: start, supervision and exit. Open `host.py` first."""
