"""What a terminal shows of a run or of a mesh while it goes on. Open `view.py` first."""
