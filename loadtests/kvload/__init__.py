"""Benchmark of keys and values that are loaded while they are computed: savings and cost. Open
`__main__.py` first.
"""
