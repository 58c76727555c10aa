"""How models lie on disk: the keys of config.json (`description.py`), the weights' files
(`checkpoint.py`).
"""
