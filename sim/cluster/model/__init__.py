"""Models of engines, shards, trainings and their cluster. Open `cluster.py` first."""
