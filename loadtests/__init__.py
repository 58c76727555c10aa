"""Measurements of MeshRL under load, each a program: `python -m loadtests.rpc`."""
