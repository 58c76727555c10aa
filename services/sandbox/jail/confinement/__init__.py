"""Kernel-enforced limits of a jail: system calls, files, rights. Open `syscall_policy.py` first."""
