"""The shared state of the mesh in Redis, a module for each kind of row. Open `redis/client.py`
first.
"""
