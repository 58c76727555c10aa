"""Directories of a mesh and of its runs: paths, owners, files, and queries. Open
`directory_paths.py` first.
"""
