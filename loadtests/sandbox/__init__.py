"""Programs in fresh jails. Open `sandboxed.py` first."""
