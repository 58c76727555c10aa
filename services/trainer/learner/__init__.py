"""Arithmetic of training, from bins to steps. Open `learner.py` first."""
