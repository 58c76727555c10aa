"""What a job is: its configuration and what follows from it alone. Open `config.py` first."""
