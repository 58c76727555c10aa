"""Checks of the mesh that is to be started, beside its job's. Open `mesh_checks.py` first."""
