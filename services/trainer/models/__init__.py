"""The models of a trainer: passes, critic, adapters, and copies in a narrower type.

Open `forward.py` first.
"""
