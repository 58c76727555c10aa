"""The program that generates, behind one actor whatever engine is inside. Open `service.py`
first."""
