"""A shard's environment processes, and the fate of trajectories when one dies. Open
`environment_pool.py` first.
"""
