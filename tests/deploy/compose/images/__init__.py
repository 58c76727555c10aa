"""The images that the trial runs: ours, by `make images`, and stand-ins for official ones."""
