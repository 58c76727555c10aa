"""Trajectories of a job with a person before them: `meshrl chat`. Open `partner.py` first."""
