"""Model of a prefix that is computed and loaded concurrently. Open `prefix_model.py` first."""
