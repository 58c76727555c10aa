"""The program that trains: core, further ranks, hybrids. Open `core/core.py` first."""
