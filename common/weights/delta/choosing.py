"""Full or delta, chunk by chunk: whichever is there first. Pure."""

from __future__ import annotations

# Bytes of a chunk a second on a core, on the low side of what was measured: a delta is applied,
# hashed and written to a file at some 1 to 2 GB/s, and made at some 2.
APPLIED_S = 1.0e9
ENCODED_S = 1.0e9
# Of a chunk, where nobody knows how fast bytes travel: a delta near that is hardly worth its blob.
MOST_SHARE = 0.8


def delta_first(delta_bytes: int, chunk_bytes: int, rate: float | None) -> bool:
    """Whether a chunk is sooner made of a delta that is there than pulled, `rate` being the bytes a
    second that arrive here; None: nobody has measured it.
    """
    if rate is None:
        return delta_bytes <= MOST_SHARE * chunk_bytes
    return delta_bytes / rate + chunk_bytes / APPLIED_S < chunk_bytes / rate


def worth_waiting(rate: float | None) -> bool:
    """Whether deltas that are being made are there before what they stand for has been pulled,
    however small they are.
    """
    return rate is None or 1 / rate > 1 / ENCODED_S + 1 / APPLIED_S
