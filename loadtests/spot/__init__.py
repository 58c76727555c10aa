"""Training with spot workers that come and go, with real kills. Open `arms.py` first."""
