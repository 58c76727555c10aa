"""Contract of every transport, the simulated network included."""
