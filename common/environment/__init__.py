"""What shards and environment processes share: their frames, and a client of MCP servers. Open
`framing.py` first.
"""
