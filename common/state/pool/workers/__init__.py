"""Workers of the pool, and the instances on them. Open `rows.py` first."""
