"""`meshrl weights`: asks for the versions of a run (`asking.py`) and shows them (`showing.py`)."""
