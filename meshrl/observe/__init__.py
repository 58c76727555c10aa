"""Observation of a run: its records, its reports, its views. Open `recorder.py` first."""
