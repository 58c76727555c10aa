"""Interactive trajectories of a job: `meshrl chat`. Open `local_player.py` first."""
