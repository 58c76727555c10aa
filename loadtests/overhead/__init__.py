"""The mesh beside the plain loop."""
