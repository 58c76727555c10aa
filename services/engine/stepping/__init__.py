"""The steps of an engine: work between them, their emulated pace, and the shards that get their
tokens. Open `commands.py` first.
"""
