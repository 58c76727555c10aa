"""Jails seen from outside: how they are made, watched and bounded. Open `jail_launcher.py`
first.
"""
