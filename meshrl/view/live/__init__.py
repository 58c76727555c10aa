"""What a terminal shows of a run or of a mesh while it goes on. Open `run_view.py` first."""
