"""The directories of a mesh and of its runs: where they are, whose, who holds them, and what lies
there. Open `places.py` first.
"""
