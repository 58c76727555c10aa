"""Starting a mesh, joining it, and stopping it. Open `head/launcher.py` first."""
