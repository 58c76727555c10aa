"""A core of several processes that hold the model in parts. Open `gang.py` first."""
