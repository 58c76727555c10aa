"""The ways by which a version reaches a host: what each must do (`base.py`, to open first), one
file a way, and which one is taken (`choosing.py`, by `bringing.py`).
"""
