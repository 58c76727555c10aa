"""The rollout shard, which admits prompts, runs their trajectories and hands in groups. Open
`shard.py` first.
"""
