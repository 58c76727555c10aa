"""Which gangs a job should have: how many accelerators of which kind train, and which gangs of
which degree of tensor parallelism generate which lengths. Open `allocation.py` first.
"""
