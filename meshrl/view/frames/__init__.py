"""The figures of a mesh at one moment as plain data. Open `frame.py` first."""
