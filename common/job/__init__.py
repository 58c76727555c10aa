"""The definition of a job: its configuration, and what follows from it alone. Open `config.py`
first.
"""
