"""Trajectories: their tokens, their turns as text, and how they fail. Open `trajectory.py`
first.
"""
