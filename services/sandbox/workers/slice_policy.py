"""Slicing policy: how many calls a worker takes, when the pool grows, when a call is overdue."""

from __future__ import annotations

from meshrl.common.mesh.process.child_handle import ProcessUsage

TARGET_SLICE_S = 0.002  # work at once: long against a frame's cost, short for a waiting caller
LONGEST_SLICE = 64  # calls; bounds the number that a crash returns to the queue
INITIAL_CALL_S = 0.001  # a call's duration, before any was measured
WEIGHT = 0.2  # share of the newest slice in the mean duration
BACKLOG_S = 0.05  # waiting work per worker that justifies the start of another


class CallDurationAverage:
    """Running mean of a call's duration."""

    def __init__(self) -> None:
        self.mean_s = INITIAL_CALL_S

    def add(self, seconds: float, calls: int) -> None:
        """Add a slice of `calls` calls that lasted `seconds` together."""
        self.mean_s += WEIGHT * (seconds / calls - self.mean_s)


def compute_slice_size(waiting: int, mean_call_s: float) -> int:
    """Return the number of calls that `SLICE_S` has room for, at least one."""
    fits = int(TARGET_SLICE_S / max(mean_call_s, 1e-6))
    return max(1, min(waiting, fits, LONGEST_SLICE))


def should_add_worker(
    waiting: int, mean_call_s: float, longest_busy_s: float, workers: int, max_workers: int
) -> bool:
    """Return whether to start a worker: much work waits, or long calls occupy all workers."""
    if workers >= max_workers or not waiting:
        return False
    return waiting * mean_call_s > BACKLOG_S * workers or longest_busy_s > BACKLOG_S


def compute_charged_s(wall_s: float, now: ProcessUsage, before: ProcessUsage) -> float:
    """Return the seconds that count against a call's deadline.

    They are the CPU time of its threads, or the wall time that it did not spend waiting for a core,
    whichever is more. So a loaded machine fails no right answer.
    """
    queued_s = now.run_queue_s - before.run_queue_s
    return max(now.cpu_s - before.cpu_s, wall_s - queued_s)
