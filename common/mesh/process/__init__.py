"""The processes of one host: how they are started, watched and ended. Open `host.py` first."""
