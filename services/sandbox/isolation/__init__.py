"""Jails as they are made and watched from outside. Open `jail_launcher.py` first."""
