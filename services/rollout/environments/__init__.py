"""A shard's environment processes, and the fate of trajectories when one dies. Open `pool.py`
first.
"""
