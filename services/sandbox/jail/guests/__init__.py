"""Programs in a jail, and what judges them there. Open `guest.py` first."""
