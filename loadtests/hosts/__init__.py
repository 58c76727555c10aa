"""A mesh over several hosts. Open `__main__.py` first."""
