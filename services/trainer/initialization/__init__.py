"""The weights that a run begins with, given or warmed. Open `initial_weights.py` first."""
