"""Parts of the trainer's load test, and what it is compared with. Open `elastic.py` first."""
