"""Detection of jobs without progress: no group, step or evaluation for a long time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshrl.common.state.jobs import JobRow, Phase
from meshrl.common.state.registry import RegistryEntry

# How long nothing may come, by phase: models are loaded, then a first group is generated; a warm
# start or an evaluation is one piece of progress, however many its steps and samples.
PROGRESS_LIMIT_MS = {
    Phase.QUEUED: 300_000,
    Phase.WARM_START: 1_800_000,
    Phase.BASELINE: 900_000,
    Phase.TRAINING: 300_000,
    Phase.EVALUATION: 900_000,
}
MIN_LIMIT_MS = 120_000  # once groups have come: nothing that a small job does takes longer
SLOW_STEP_FACTOR = 2  # than the slowest of late: then it is no slow step any more
WORKING_KINDS = (
    *("trainer", "rank", "hybrid", "engine"),
    *("scoring", "rollout", "sandbox"),
)  # in order
MIN_REPORTED_LAG_MS = 1_000  # lag of an event loop that is reported


def measure_no_progress_ms(job: JobRow, now_ms: float) -> float:
    """Return the milliseconds without progress if they exceed the limit; else 0.

    A job that waits or is paused makes no progress by decision.
    """
    if job.is_terminal or job.block_reason or not job.progress_ms:
        return 0.0
    running = job.phase == Phase.TRAINING and job.slowest_progress_ms
    least = MIN_LIMIT_MS if running else PROGRESS_LIMIT_MS[job.phase]
    since_ms = now_ms - job.progress_ms
    return since_ms if since_ms > max(least, SLOW_STEP_FACTOR * job.slowest_progress_ms) else 0.0


def describe_no_progress(job: JobRow, now_ms: float) -> str:
    """Return how long a job has made no progress, and its position; empty if within the limit."""
    since_ms = measure_no_progress_ms(job, now_ms)
    return f"for {since_ms / 1000:.0f} s {describe_position(job)}" if since_ms else ""


def describe_position(job: JobRow) -> str:
    """Return the phase and step of a job that makes no progress."""
    steps = job.document.get("budget", {}).get("steps", "?")
    return (
        "no group, step or evaluation has completed; the job is in phase "
        f"{str(job.phase).replace('_', ' ')}, at step {job.steps_done} of {steps}"
    )


def list_working_processes(entries: Sequence[RegistryEntry]) -> list[RegistryEntry]:
    """Return the processes that jobs progress by, in the order of their kinds."""
    alive = [entry for entry in entries if entry.alive and entry.kind in WORKING_KINDS]
    return sorted(alive, key=lambda entry: (WORKING_KINDS.index(entry.kind), entry.name))


def describe_activity(entry: RegistryEntry, now_ms: float) -> str:
    """Return what a process reports of itself: how its event loop runs, and its longest wait."""
    parts = ["ready" if entry.stats.get("ready", True) else "not ready"]
    lag_ms = float(entry.stats.get("loop_lag_ms", 0.0))
    if lag_ms > MIN_REPORTED_LAG_MS:
        parts.append(f"its event loop is {lag_ms / 1000:.1f} s late")
    running = {k: entry.stats[k] for k in ("running", "serving", "in_flight") if k in entry.stats}
    parts += [f"{name.replace('_', ' ')} {count}" for name, count in running.items() if count]
    waits: list[dict[str, Any]] = sorted(entry.waits, key=lambda wait: int(wait["since_ms"]))
    if waits:
        wait = waits[0]
        since_s = (now_ms - wait["since_ms"]) / 1000
        parts.append(f"waits for {wait['on']} ({wait['what']}) for {since_s:.0f} s")
    else:
        parts.append("waits for no process")
    return f"{entry.name} ({entry.pid}): {', '.join(parts)}"
