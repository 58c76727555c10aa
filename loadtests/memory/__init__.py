"""Estimated memory of tiny models' processes against measured peaks."""
