"""Hybrids, which transfer gradients to a core for some rounds. Open `gradient_collector.py` first.

*Hybrid* is Libra's word for an instance that temporarily helps to train.
"""
