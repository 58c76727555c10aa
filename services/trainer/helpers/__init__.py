"""Hybrids, which lend gradients to a core for some rounds. Open `gradients.py` first."""
