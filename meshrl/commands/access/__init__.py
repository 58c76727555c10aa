"""Tokens, which let people and hosts in, and the secrets of a mesh to be."""
