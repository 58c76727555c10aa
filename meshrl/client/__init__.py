"""What Python code asks of a mesh, and the command line with it. Open `client.py` first, then
`transport.py`.
"""
