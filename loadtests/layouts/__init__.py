"""What plans are compared with: everything tried, and Libra's released search. Open `cases.py`
first.
"""
