"""History of a run from its events and step rows. Open `run_snapshot.py` first."""
