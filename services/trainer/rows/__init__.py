"""What processes of a core write and read of their own rows: versions and checkpoints. Open
`staging.py` first.
"""
