"""Trajectories of a job with a person before them: `meshrl chat`. Open `local_player.py` first."""
