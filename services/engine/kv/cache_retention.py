"""Choice between a copy of an engine's cache and its recomputation, when the cache must leave.

Cake (arXiv 2410.03065) compares the same two costs for cached prefixes.
"""

from __future__ import annotations


def prefers_recomputation(copy_s: float, cached_tokens: int, prefill_tokens_per_s: float) -> bool:
    """Return True if running requests recompute their cache sooner than it is copied.

    Args:
        copy_s: Seconds to copy the blocks in use away and back; 0: not measured yet.
        cached_tokens: Tokens of running requests that would be computed again.
        prefill_tokens_per_s: Measured rate; 0: not measured yet.
    """
    if cached_tokens == 0:
        return True  # idle sessions alone are not worth a copy at every switch
    if not prefill_tokens_per_s or not copy_s:
        return False
    return cached_tokens / prefill_tokens_per_s < copy_s
