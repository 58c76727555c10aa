"""Reward `code_tests`. Open `code_reward.py` first."""
