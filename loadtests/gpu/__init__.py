"""Check of a GPU host: each case in a process that may die alone. Open `__main__.py` first."""
