"""Training of an MoE model on two kinds of accelerators. Open `zebra_learner.py` first."""
