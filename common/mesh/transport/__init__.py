"""Transports, which carry frames between processes. Open `base.py` first."""
