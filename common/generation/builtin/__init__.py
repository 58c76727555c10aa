"""The built-in engine: its scheduler, its slots and its paged cache. Open `engine.py` first."""
