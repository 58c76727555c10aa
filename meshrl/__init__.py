"""The face: the command line and what it does. Open `cli.py` first."""
