"""What rewards compare: a model's answer, a row's gold, its tests. Open `answers.py` first.

Golds and tests are read before any trajectory is scored, by the command line, and by the sandbox at
each row.
"""
