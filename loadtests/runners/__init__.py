"""Programs in a runner's containers."""
