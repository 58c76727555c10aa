"""The pool in Redis. Open `store.py` first."""
