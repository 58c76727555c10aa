"""Choice between full transfer and delta of each chunk: the faster one. Pure."""

from __future__ import annotations

# Bytes of a chunk per second on one core, on the low side of measurements: a delta is applied,
# hashed and written to a file at some 1 to 2 GB/s, and encoded at some 2.
APPLY_BYTES_PER_S = 1.0e9
ENCODE_BYTES_PER_S = 1.0e9
# Of a chunk, if the rate is unknown: a larger delta is hardly worth its blob.
MAX_DELTA_FRACTION = 0.8


def is_delta_faster(delta_bytes: int, chunk_bytes: int, rate_bytes_per_s: float | None) -> bool:
    """Return True if applying an available delta is faster than pulling the chunk.

    Args:
        rate_bytes_per_s: Rate at which bytes arrive here; None: not measured.
    """
    if rate_bytes_per_s is None:
        return delta_bytes <= MAX_DELTA_FRACTION * chunk_bytes
    return (
        delta_bytes / rate_bytes_per_s + chunk_bytes / APPLY_BYTES_PER_S
        < chunk_bytes / rate_bytes_per_s
    )


def is_worth_waiting(rate_bytes_per_s: float | None) -> bool:
    """Return True if a chunk could be encoded and applied as a delta faster than pulled.

    The size of the delta is neglected.
    """
    return (
        rate_bytes_per_s is None
        or 1 / rate_bytes_per_s > 1 / ENCODE_BYTES_PER_S + 1 / APPLY_BYTES_PER_S
    )
