"""Trajectories with the model of a run, without a mesh. Open `chatting.py` first."""
