"""One function, and three assertions."""
