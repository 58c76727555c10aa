"""Memory of the ranks of a core."""
