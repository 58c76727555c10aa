"""Checks of a job in two phases: `job_file`, what the job file alone shows, then `host`, what this
host shows before a mesh starts.
"""
