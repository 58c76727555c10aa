"""Tokens, by which people without an account of the mesh's user reach it. Open `token_registry.py`
first, then `access_token.py`.
"""
