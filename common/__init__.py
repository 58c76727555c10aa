"""Code that every program shares: calls, state, formats, the model, generation. Open
`runtime/mesh.py` first.
"""
