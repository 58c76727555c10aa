"""Reward `math`. Open `math_reward.py` first."""
