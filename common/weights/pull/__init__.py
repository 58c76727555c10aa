"""Fetches chunks that a host lacks, from the weight store and from hosts that have them. Open
`chunk_pull.py` first.
"""
