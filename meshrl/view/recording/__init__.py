"""Record of a job, written while it runs. Open `recorder.py` first."""
