"""Ranks of a gang that meet."""
