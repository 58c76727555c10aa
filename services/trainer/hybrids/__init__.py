"""Hybrids, which lend gradients to a core for some rounds. Open `gradient_collector.py` first.

*Hybrid* is Libra's word for a resident that helps to train; elsewhere it would be called a helper.
"""
