"""Starting a mesh, joining it, and stopping it. Open `launcher.py` first."""
