"""A rollout shard: admits prompts, runs their trajectories, hands in groups. Open `shard.py`
first."""
