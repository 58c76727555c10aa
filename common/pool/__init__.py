"""The pool as the planner sees and changes it: plain data. Open `rows.py` first, then `snapshot.py`
and `decisions.py`.
"""
