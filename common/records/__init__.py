"""Formats of files that several programs read or write. Open `ledger.py` first."""
