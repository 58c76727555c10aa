"""Declared performance of accelerators."""
