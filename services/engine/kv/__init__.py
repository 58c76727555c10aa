"""Keys and values outside of the engine's cache: in host memory, on the host's disk, at other
engines. Open `host_cache.py` first.
"""
