"""Inputs of a reward: the model's answer, the row's gold or tests. Open `answers.py` first.

The command line parses golds and tests before any trajectory is scored; the sandbox parses each
row's again.
"""
