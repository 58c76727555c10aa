"""Report of a run, `report.html`. Open `report.py` first."""
