"""Shared state of the mesh in Redis, one module for each kind of row. Open `redis/client.py`
first.
"""
