"""Processes of one host: started, watched and ended. Open `host.py` first."""
