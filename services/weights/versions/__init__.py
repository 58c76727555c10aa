"""What people do with the versions of a run, from its files alone, while it goes on or afterwards:
see which there are (`run_versions.py`, to open first), pin, compare, export and import them.
"""
