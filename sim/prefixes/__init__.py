"""A prefix that is computed and loaded at once, modelled. Open `meeting.py` first."""
