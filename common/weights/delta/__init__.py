"""Deltas: chunks of a version are made from those of an earlier one and the changed elements.

A delta is a way of transfer only: the manifest defines the version. Open `codec.py`, which makes
and applies one, then `sender.py` and `receiver.py`.
"""
