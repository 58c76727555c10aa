"""Jails in a stronger container, which a job's `sandbox.runner` starts. Open `spawner.py` first."""
