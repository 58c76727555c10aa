"""Pull of chunks that a host is missing, from the weight store and from hosts that have them. Open
`chunk_pull.py` first.
"""
