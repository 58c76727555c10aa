"""Processes as forks of one that has imported what they need. Open `fork_server.py` first."""
