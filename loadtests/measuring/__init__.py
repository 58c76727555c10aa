"""Shared tools of load tests: meters of CPU time, small meshes, other generators. Open `metered.py`
first.
"""
