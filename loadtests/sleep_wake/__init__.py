"""A core that sleeps and wakes. Open `sleeping_rank.py` first."""
