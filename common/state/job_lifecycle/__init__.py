"""Lifecycle of a job, from its feasibility to its deletion. Open `job_status.py` first."""
