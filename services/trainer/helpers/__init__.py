"""Hybrids (Libra's word for helpers), which compute gradients of rounds for a core. Open
`gradients.py` first.
"""
