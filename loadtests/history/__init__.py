"""Checks the history of a run from its files, with code of its own: see `__main__`."""
