"""Keys and values outside of the engine's cache: in the host's memory, on its disk, at other
engines. Open `host_cache.py` first.
"""
