"""Weight versions: what a manifest says (`manifest.py`, to open first), who they are whatever cut
them (`identity.py`), and how they are published and received.
"""
