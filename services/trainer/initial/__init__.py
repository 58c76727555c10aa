"""The weights that a run begins with, given or warmed. Open `beginning.py` first."""
