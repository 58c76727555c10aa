"""Settings of this host's user: ports, secrets, terminal. Open `settings.py` first."""
