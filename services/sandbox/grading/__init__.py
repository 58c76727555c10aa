"""Verifiable rewards, which compare an answer with the row's. Open `texts.py` first."""
