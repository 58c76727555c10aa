"""What accelerators can do, as their makers declare it. Open `accelerators.py` first."""
