"""What collectives take, as rings do them (Patarasuk and Yuan 2009), and messages."""

from __future__ import annotations


def all_reduce_s(size: float, ranks: int, bytes_per_s: float) -> float:
    """Seconds until each of so many ranks has the sum of `size` bytes of each."""
    return 2.0 * gather_s(size, ranks, bytes_per_s)


def gather_s(size: float, ranks: int, bytes_per_s: float) -> float:
    """Seconds until each rank has the whole of `size` bytes that are spread evenly over them; the
    same for the sum of which each keeps its part.
    """
    return (ranks - 1) / ranks * size / bytes_per_s


def all_to_all_s(size: float, ranks: int, bytes_per_s: float) -> float:
    """Seconds until `size` bytes of each rank are where they belong, spread evenly over all."""
    return (ranks - 1) / ranks * size / bytes_per_s
