"""Terminal views of a running run or mesh. Open `run_view.py` first."""
