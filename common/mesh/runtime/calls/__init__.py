"""Calls and streams between actors: client and server halves, and shared parts. Open `caller.py`
first.
"""
