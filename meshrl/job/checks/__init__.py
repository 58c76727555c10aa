"""Checks of a job in two phases: `file`, what the job file alone shows, then `machine`, what this
host shows before a mesh starts.
"""
