"""Initial weights of a run, pretrained or warm-started. Open `initial_weights.py` first."""
