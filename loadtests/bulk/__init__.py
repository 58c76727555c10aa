"""The bulk port beside TLS."""
