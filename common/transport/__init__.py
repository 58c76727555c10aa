"""Transports: how frames travel."""
