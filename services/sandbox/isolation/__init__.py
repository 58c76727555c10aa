"""Jails from outside: creation, supervision and limits. Open `jail_launcher.py` first."""
