"""What a shard and environment processes share: their frames, and MCP servers. Open
`framing.py` first."""
