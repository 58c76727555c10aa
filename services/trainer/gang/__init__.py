"""The arithmetic of a core, on one process or on several that each hold part of the model, as rank 0
runs it. Open `compute.py` first.
"""
