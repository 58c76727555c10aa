"""Forks of a process that has imported the needed modules. Open `fork_server.py` first."""
