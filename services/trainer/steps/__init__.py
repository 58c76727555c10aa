"""Step of the core, from leased groups to the optimizer. Open `training_step.py` first."""
