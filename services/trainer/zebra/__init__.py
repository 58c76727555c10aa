"""A mixture trained on two kinds of accelerators. Open `zebra_learner.py` first."""
