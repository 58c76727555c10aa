"""Fetches chunks that a host lacks, from the weight store and from hosts that have them. Open
`pull.py` first.
"""
