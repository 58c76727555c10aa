"""Processes of a scene. Open `member.py` first."""
