"""The core of a training gang, from groups to committed steps, checkpoints and recovery. Open
`core.py` first.
"""
