"""Baselines of plans: exhaustive search, and Libra's released search. Open `cases.py` first."""
