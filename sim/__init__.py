"""A mesh under virtual time: loop, host, network, state, and a whole mesh of them. Open `mesh.py`
first.
"""
