"""Cluster simulator: the product's decisions on modelled machines; see `model/cluster.py`."""
