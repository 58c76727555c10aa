"""A rank beside the first, and the actor that takes the orders of rank 0. Open `rank.py` first."""
