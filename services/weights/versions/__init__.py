"""Commands on the versions of a run, from its files alone, during the run or afterwards.

They list (`run_versions.py`, to open first), pin, compare, export and import versions.
"""
