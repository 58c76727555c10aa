"""Plans and passes without padding. Open `comparing.py` first."""
