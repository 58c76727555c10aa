"""The state of a batch that scheduler and arithmetic of the built-in engine share: slots, blocks of
the cache, adapters. Open `slots.py` first.
"""
