"""Limits of a jail that the kernel keeps: system calls, files, rights. Open `allowed.py` first."""
