"""Access to Redis from other hosts: ports, certificates, users. Open `network.py` first."""
