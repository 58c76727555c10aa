"""A mesh's start, joining and end. Open `launcher.py` first."""
