"""Layouts of a job: accelerators that train, and gangs that generate, by kind, degree of tensor
parallelism and range of lengths. Open `allocation.py` first.
"""
