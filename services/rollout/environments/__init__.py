"""A shard's environment processes, and what becomes of trajectories when one dies. Open
`pool.py` first."""
