"""Whom a shard asks for rewards: sandboxes, frozen models, judges. Open `sandboxes.py` first."""
