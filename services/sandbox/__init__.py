"""Tools and rewards in isolation."""
