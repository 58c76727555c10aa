"""Workers of the pool, and the residents on them. Open `rows.py` first."""
