"""Foundations without any process or network: errors, clocks, random numbers, digests. Open
`errors.py` first.
"""
