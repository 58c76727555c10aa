"""The arithmetic of one step of the built-in engine, a module for each path. Open `graphs.py`
first.
"""
