"""Modelled engines, shards, trainings and the cluster that has them. Open `cluster.py` first."""
