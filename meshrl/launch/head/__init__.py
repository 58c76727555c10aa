"""Root of a mesh at its head: it starts Redis and the services, admits hosts, and restores jobs.
Open `launcher.py` first.
"""
