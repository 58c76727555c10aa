"""Hosts of a mesh: how each stands, its keys, and its drain."""
