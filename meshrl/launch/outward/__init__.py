"""What a host as a whole shows to those who operate it. Open `outward.py` first."""
