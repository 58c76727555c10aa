"""The directories of a mesh and of its runs: where they are, whose, what lies there, and what their
own processes tell of it. Open `directory_paths.py` first.
"""
