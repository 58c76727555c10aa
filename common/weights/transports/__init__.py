"""The ways by which a version reaches a host: one file a way (`version_fetcher.py`, to open first,
has what each must do and the plainest), and which one is taken (`selector.py`).
"""
