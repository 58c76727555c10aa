"""The Redis server itself: started, identified, older than it was. Open `embedded.py` first."""
