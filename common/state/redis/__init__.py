"""Redis client, its scripts, and the embedded server. Open `client.py` first."""
