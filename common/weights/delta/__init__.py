"""Deltas: how chunks of a version reach a host that has those of an earlier one, by the elements
that changed alone. They are transport: what a version is, its manifest says. Open `codec.py`, which
makes and applies one, then `sender.py` and `receiver.py`.
"""
