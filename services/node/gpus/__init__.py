"""A host's accelerators: which there are, how they fare, what room they have. Open
`accelerators.py` first.
"""
