"""Programs in a jail, and their test harnesses. Open `guest.py` first."""
