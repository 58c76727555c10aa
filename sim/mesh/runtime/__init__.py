"""Runtime of a virtual mesh from its start to its end, without faults. Open `virtual_mesh.py`
first.
"""
