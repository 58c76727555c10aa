"""The programs of a mesh, a package each; none imports another. Open `rollout/shard.py`
first.
"""
