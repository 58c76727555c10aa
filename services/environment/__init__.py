"""The program that runs users' environments. Open `environments.py` first."""
