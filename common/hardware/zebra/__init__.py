"""Zebra parallelism (HeterMoE, arXiv 2504.03871). Open `schedule.py` first.

Attention runs on new accelerators, a mixture's experts on old ones, and micro-batches zigzag
between them.
"""
