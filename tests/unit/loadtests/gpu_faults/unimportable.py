"""Part whose import fails."""

raise ImportError("no such kernel")
