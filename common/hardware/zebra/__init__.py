"""Mixed generations: attention on new accelerators, a mixture's experts on old ones, micro-batches
zigzagging between them (Zebra parallelism, HeterMoE, arXiv 2504.03871). Open `schedule.py` first.
"""
