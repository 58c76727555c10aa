"""Full or delta, chunk by chunk: whichever is there first. Pure."""

from __future__ import annotations

# Bytes of a chunk a second on a core, on the low side of what was measured: a delta is applied,
# hashed and written to a file at some 1 to 2 GB/s, and made at some 2.
APPLY_BYTES_PER_S = 1.0e9
ENCODE_BYTES_PER_S = 1.0e9
# Of a chunk, where nobody knows how fast bytes travel: a delta near that is hardly worth its blob.
MAX_DELTA_FRACTION = 0.8


def is_delta_faster(delta_bytes: int, chunk_bytes: int, rate_bytes_per_s: float | None) -> bool:
    """Whether a chunk is sooner made of a delta that is there than pulled, `rate_bytes_per_s` being
    the bytes a second that arrive here; None: nobody has measured it.
    """
    if rate_bytes_per_s is None:
        return delta_bytes <= MAX_DELTA_FRACTION * chunk_bytes
    return (
        delta_bytes / rate_bytes_per_s + chunk_bytes / APPLY_BYTES_PER_S
        < chunk_bytes / rate_bytes_per_s
    )


def is_worth_waiting(rate_bytes_per_s: float | None) -> bool:
    """Whether deltas that are being made are there before what they stand for has been pulled,
    however small they are.
    """
    return (
        rate_bytes_per_s is None
        or 1 / rate_bytes_per_s > 1 / ENCODE_BYTES_PER_S + 1 / APPLY_BYTES_PER_S
    )
