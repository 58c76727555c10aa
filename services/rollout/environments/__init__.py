"""Environment processes of a shard, and recovery of trajectories when one exits. Open
`environment_pool.py` first.
"""
