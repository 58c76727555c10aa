"""Virtual time: loop, processes, hosts, network, state, Redis, and a whole mesh of them in `mesh`.
Open `virtual_loop.py` first.
"""
