"""A sandbox under minutes of load."""
