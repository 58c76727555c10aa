"""A mixture trained on two kinds of accelerators. Open `learner.py` first."""
