"""Simulated clusters beside meshes."""
