"""Objects across two jails. Open `proxies.py` first."""
