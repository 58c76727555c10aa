"""The files of a saved state, and the rows in them. Open `saved_rows.py` first."""
