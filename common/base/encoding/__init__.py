"""Typed messages as bytes. Open `messages.py` first."""
