"""Access to Redis from other hosts: ports, certificates, users. Open `redis_network.py` first."""
