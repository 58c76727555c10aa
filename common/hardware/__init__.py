"""What accelerators can do, as their makers declare it. Open `profiles.py` first."""
