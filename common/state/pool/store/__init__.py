"""The pool in Redis. Open `pool_rows.py` first."""
