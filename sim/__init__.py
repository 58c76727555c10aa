"""A mesh under virtual time: its loop, host, network and state, and a whole mesh of them.
Open `mesh.py` first."""
