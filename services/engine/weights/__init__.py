"""The weights of an engine: how a version is received, merged and put in place. Open
`engine_weights.py` first.
"""
