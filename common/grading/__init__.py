"""What a row's tests are, and which runner can grade by them. Open `support.py` first.

Read before any trajectory is scored, by the command line, and by the sandbox at each row.
"""
