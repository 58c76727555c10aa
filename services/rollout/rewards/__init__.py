"""Clients of all that scores trajectories: sandboxes, frozen models, judges. Open `sandboxes.py`
first.
"""
