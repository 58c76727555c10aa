"""Sharding of a gang's model into rows. Open `learners.py` first."""
