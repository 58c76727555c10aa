"""A step of the core, from leased groups to the optimizer. Open `step.py` first."""
