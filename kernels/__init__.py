"""Kernels faster than PyTorch, each with a reference in it. Open `ops/dispatch.py` first."""
