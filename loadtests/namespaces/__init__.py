"""Hosts that share nothing but a network, made on this one. Open `hosts.py` first."""
