"""Images that the trial runs: ours, built by `make images`, and stand-ins for official ones."""
