"""The arithmetic of a core, on one process or on several that each hold part of the model. Open
`compute.py` first.
"""
