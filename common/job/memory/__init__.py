"""Arithmetic of the bytes that a job's processes take; `plan.py` has its results."""
