"""Jails that spin. Open `spinning.py` first."""
