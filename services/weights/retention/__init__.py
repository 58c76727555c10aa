"""What stays in the store and what goes: the policy is `policy.py`, to open first, and
`sweeper.py` acts by it.
"""
