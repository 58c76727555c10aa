"""Verifiable rewards, which compare an answer with the row's. Open `text_rewards.py` first."""
