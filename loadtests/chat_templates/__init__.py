"""Conversations in published chat templates. Open `comparing.py` first."""
