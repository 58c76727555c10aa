"""Tokens, by which people without an account of the mesh's user reach it. Open `tokens.py` first,
then `ticket.py`.
"""
