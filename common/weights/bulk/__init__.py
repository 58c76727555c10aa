"""The bulk port: large bytes beside the control traffic, by digest. Open `port.py` first."""
