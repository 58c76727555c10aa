"""Images that the trial runs: ours, built by compose.yaml, and stand-ins for official ones."""
