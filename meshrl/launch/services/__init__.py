"""The services of one host and their fork server: planned, started, watched. Open `services.py`
first.
"""
