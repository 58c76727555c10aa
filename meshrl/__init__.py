"""The command line and what it does, which is all that users of a mesh call. Open `cli/runs.py`
first.
"""
