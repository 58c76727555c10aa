"""Residency of a worker's instances: which kinds of their tensors are on its accelerator."""
