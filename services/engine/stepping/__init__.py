"""Steps of an engine: commands between them, their emulated speed, and the shards that receive the
tokens. Open `commands.py` first.
"""
