"""Commands by which hosts join and leave a mesh. Open `joining.py` first."""
