"""Retention of versions and chunks in the store: the policy is `policy.py`, to open first, and
`sweeper.py` applies it.
"""
