"""The root of a mesh, at its head: it brings up Redis and the services, lets hosts in, and takes up
what was left. Open `launcher.py` first.
"""
