"""Routing of turns: the engine and time of each turn, and moves of its KV cache. Open `router.py`
first.
"""
