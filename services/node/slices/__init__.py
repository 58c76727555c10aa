"""Time slices of a gang: policies, queue, switch costs and the scheduler. Open `slice_scheduler.py`
first.
"""
