"""A step of the built-in engine's arithmetic, by each path that a host may offer. Open
`eager.py` first."""
