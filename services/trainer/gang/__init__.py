"""A core of several processes that each hold part of the model, as rank 0 runs it. Open `gang.py`
first.
"""
