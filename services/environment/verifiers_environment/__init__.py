"""Environments of the package `verifiers`, run in its own interpreter. Open `boot.py` first."""
