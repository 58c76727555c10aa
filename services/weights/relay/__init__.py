"""Hosts that fetch a version serve it on: who gets which chunk from whom. Open `relaying.py`
first.
"""
