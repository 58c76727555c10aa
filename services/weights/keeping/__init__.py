"""What stays in the store and what goes: the policy is `retention.py`, to open first, and
`sweeping.py` acts by it.
"""
