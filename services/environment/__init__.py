"""Program that runs users' environments. Open `environments.py` first."""
