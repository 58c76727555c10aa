"""What the events and step rows of a run tell. Open `run_snapshot.py` first."""
