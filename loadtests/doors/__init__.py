"""Tries every door of a running mesh as another user of the host. Open `__main__.py` first."""
