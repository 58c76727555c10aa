"""Calls between two processes. Open `payloads.py` first."""
