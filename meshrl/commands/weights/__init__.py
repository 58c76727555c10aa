"""`meshrl weights`: shows versions (`showing.py`) and how they travelled (`explaining.py`)."""
