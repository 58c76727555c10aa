"""Objects across two jails. Open `remote.py` first."""
