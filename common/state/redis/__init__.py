"""The client of Redis, its scripts, and a server of our own. Open `client.py` first."""
