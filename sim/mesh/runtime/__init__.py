"""A virtual mesh from its start to its end, without anything that fails. Open `virtual_mesh.py`
first.
"""
