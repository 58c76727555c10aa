"""Instance of a gang, as its worker controls it: sleep, wake and time slices. Open `tiers.py`
first.
"""
