"""The weights that a run begins with: as given, drawn, or after a warm start. Open `beginning.py`
first.
"""
