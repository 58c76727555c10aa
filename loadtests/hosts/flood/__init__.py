"""Malformed bytes against every listening port of a mesh. Open `__main__.py` first."""
