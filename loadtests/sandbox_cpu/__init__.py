"""Jails that spin."""
