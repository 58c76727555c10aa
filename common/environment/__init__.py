"""Frames between shards and environment processes, and a client of MCP servers. Open `framing.py`
first.
"""
