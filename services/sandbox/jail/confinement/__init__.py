"""Limits of a jail that the kernel keeps: system calls, files, rights.
Open `syscall_policy.py` first.
"""
