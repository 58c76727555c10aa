"""Kernels that are faster than PyTorch, each with a reference in PyTorch. Open `ops/dispatch.py`
first.
"""
