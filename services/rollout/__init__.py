"""Rollout shard: it admits prompts, runs their trajectories and submits groups. Open `shard.py`
first.
"""
