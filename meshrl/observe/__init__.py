"""What people look at: records, reports and views of a run. Open `recorder.py` first."""
