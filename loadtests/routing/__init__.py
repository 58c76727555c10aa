"""Makespans by routing policy."""
