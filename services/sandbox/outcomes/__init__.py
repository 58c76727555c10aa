"""What calls and processes of a sandbox come to. Open `answer.py` first."""
