"""The pool as the planner sees and changes it: plain data. Open `workers/rows.py` first, then
`scheduling/snapshot.py` and `scheduling/decisions.py`.
"""
