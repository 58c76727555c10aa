"""The files of a saved state and of a version, and the rows that a process reads of them. Open
`saved.py` first.
"""
