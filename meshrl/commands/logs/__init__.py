"""Logs of the processes of a mesh, on this host and on others."""
