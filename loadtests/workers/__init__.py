"""Processes that load tests start. Open `engine_member.py` first."""
