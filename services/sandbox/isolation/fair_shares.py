"""The fair-share policy: which job gets the next jail of a bounded number, so that none starves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

RESERVED = 4  # one slot in so many is kept free of a job that has taken all others


def most_of_one(slots: int, jobs: int) -> int:
    """Jails that one job may have at a time: all of them only while it is alone.

    A job whose every call runs to its deadline would otherwise make the others wait for that.
    """
    if jobs <= 1 or slots < 2:
        return slots
    return slots - max(1, slots // RESERVED)


def chosen(waiting: Sequence[str], running: Mapping[str, int], slots: int, jobs: int) -> str:
    """The job whose call starts next; empty: no job may, or no jail is free. It is the one with the
    fewest jails; among equals, the first of `waiting`, which is in the order of last turns.
    """
    if sum(running.values()) >= slots:
        return ""
    most = most_of_one(slots, jobs)
    allowed = [job for job in waiting if running.get(job, 0) < most]
    return min(allowed, key=lambda job: running.get(job, 0), default="")
