"""Transports of versions to a host, one file each, and the choice between them (`selector.py`).

Open `version_fetcher.py` first: it has the interface and the pull.
"""
