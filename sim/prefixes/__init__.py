"""A prefix that is computed and loaded at once, modelled. Open `prefix_model.py` first."""
