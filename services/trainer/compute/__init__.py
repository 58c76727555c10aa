"""Where a core computes: the interface, one process, and the wrappers for turns and pace. Open
`compute.py` first.
"""
