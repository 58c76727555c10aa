"""The Redis server itself: identified, or older than it was. Open `rollback.py` first."""
