"""The pool as the planner sees and changes it: plain data. Open `workers/rows.py` first, then
`placing/snapshot.py` and `placing/decisions.py`.
"""
