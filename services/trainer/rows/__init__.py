"""Files of a saved state, and their rows. Open `saved_rows.py` first."""
