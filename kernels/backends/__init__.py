"""The implementations of the operators: C++ for CPUs, CUDA and Triton for GPUs, and plain PyTorch.
Open `reference.py` first.
"""
