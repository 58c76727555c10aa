"""Simulation under virtual time: loop, processes, hosts, network, state, Redis, and a virtual mesh
in `mesh`. Open `virtual_loop.py` first.
"""
