"""Implementations of the operators in C++, CUDA, Triton and PyTorch. Open `reference.py` first."""
