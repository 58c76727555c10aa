"""State of the Redis server: identity and rollback detection. Open `rollback.py` first."""
