"""Pool as the planner reads and changes it: plain data. Open `workers/rows.py` first, then
`scheduling/snapshot.py` and `scheduling/decisions.py`.
"""
