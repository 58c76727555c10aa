"""Code that every program shares: calls, state, formats, the model, generation. Open
`mesh/runtime/mesh.py` first.
"""
