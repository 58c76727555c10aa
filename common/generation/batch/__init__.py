"""Batch state that scheduler and backends of the built-in engine share: slots, cache blocks,
adapters. Open `slots.py` first.
"""
