"""Generation of long-tailed lengths."""
