"""What every transport does, the simulated network among them."""
