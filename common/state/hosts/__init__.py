"""Admission of hosts to a mesh: credentials, requests, and permissions in Redis."""
