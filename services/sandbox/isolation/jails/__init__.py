"""Running jails: their pipes, their ends, the zygotes that fork them. Open `jail.py` first."""
