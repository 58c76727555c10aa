"""The cluster simulator: what runs a mesh decides for modelled machines; see `model/cluster.py`."""
