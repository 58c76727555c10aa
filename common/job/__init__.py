"""Definition of a job: its configuration, and values derived from it. Open `config.py` first."""
