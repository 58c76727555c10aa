"""Growth of a mesh that trains."""
