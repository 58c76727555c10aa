"""Workloads at declared paces on the virtual mesh: what a split of the workers is worth, in virtual
time. Open `workload.py` first.
"""
