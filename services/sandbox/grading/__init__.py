"""Verifiable rewards, which compare an answer with the row's. Open `answers.py` first."""
