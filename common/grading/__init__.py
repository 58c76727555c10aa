"""Inputs of a reward: the model's answer, the row's gold or tests. Open `answers.py` first.

Golds and tests are read before any trajectory is scored, by the command line, and by the sandbox at
each row.
"""
