"""Keys and values that are loaded while they are computed: what it saves, and what it costs. Open
`__main__.py` first.
"""
