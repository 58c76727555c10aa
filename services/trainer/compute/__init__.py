"""The pieces of a core's arithmetic, and the interfaces by which its weights and state leave it.
Open `piece_runner.py` first.
"""
