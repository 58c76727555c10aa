"""Access tokens for users without an account on the mesh's hosts. Open `token_registry.py` first,
then `access_token.py`.
"""
