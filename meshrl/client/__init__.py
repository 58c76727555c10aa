"""Requests to a mesh from Python code, and from the command line. Open `client.py` first, then
`local_transport.py`.
"""
