"""The reward `math`. Open `math_reward.py` first."""
