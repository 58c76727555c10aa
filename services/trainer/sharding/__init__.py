"""How the model of a gang is cut into rows, of which each rank has its own. Open `learners.py`
first.
"""
