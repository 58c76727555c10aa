"""Parts of the load test of starts. Open `roles.py` first."""
