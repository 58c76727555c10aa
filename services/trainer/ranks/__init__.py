"""A core of several processes that each hold part of the model. Open `gang.py` first."""
