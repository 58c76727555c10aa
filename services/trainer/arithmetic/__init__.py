"""The arithmetic of training: from bins to gradients and optimizer steps. Open `learner.py`
first.
"""
