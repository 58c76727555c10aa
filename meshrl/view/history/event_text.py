"""Events of a run as lines for people."""

from __future__ import annotations

from meshrl.common.base.files import corruption
from meshrl.common.mesh.process.diagnosis.failure import format_failure as failure_text
from meshrl.common.state.events import Event
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.store.planner_reports import (
    MOVE_OUTCOME_EVENT,
    SPEEDUP_RULES,
    decode_move_outcome,
)
from meshrl.view.history import move_outcomes
from meshrl.view.history.blocked_jobs import ADMISSION
from meshrl.view.mesh import gpu_status

STOPPED_PREFIX = "stopped"  # exit reason of a process that its supervisor was ordered to stop
ALERT_KINDS = {
    "process_ended",
    "worker_gave_up",
    "host_lost",
    "scaler_failed",
    "unrecorded",
    "storage_full",
    "history_lost",
    "gpu",
    "durable_failed",
    "durable_taken_over",
    "version_copy_failed",
    "weights_quota",
    "weights_refused",
    corruption.CORRUPTION_EVENT,
}  # worth a line anywhere

# Kinds of events with a fixed text, with the fields of each.
EVENT_TEXTS = {
    "lost": "worker {worker} is lost: {reason}",
    "host_back": "host {host} is back",
    "scaled": "the provider is to run {hosts} spot hosts",
    "scaler_failed": "scaling to {hosts} spot hosts failed, again in {retry_s:g} s: {error}",
    "worker_gave_up": "{name} exits repeatedly: {why}",
    "unrecorded": "the run is not recorded: {why}",
    "durable_failed": "the durable copy, from which another head can resume, failed: {error}",
    "durable_taken_over": "another mesh has taken over {url}: this mesh copies nothing there "
    "any more",
    "version_copy_failed": "copying a version to {url} failed: {error}",
    "weights_quota": "weights.quota_gb: {why}. {fix}",
    "weights_refused": "training waits: weights.quota_gb is too small: {why}. {fix}",
    "history_lost": "history_lost: events after {since} up to {through} were lost; the "
    "account continues from rows in Redis",
    "move_declined": "the planner rejected a move: {reason}",
    "place_declined": "the planner rejected a place: {reason}",
}


def is_unexpected_exit(event: Event) -> bool:
    """Return True for the exit of a process that was not ordered to stop."""
    return event.kind == "process_ended" and not event.fields["why"].startswith(STOPPED_PREFIX)


def format_event(event: Event) -> str:
    """Return an event as a line for people; empty for those that are not worth a line."""
    f = event.fields
    if text := EVENT_TEXTS.get(event.kind):
        return text.format_map(f)
    if event.kind == "move":
        line = f"{f['gang']} moved from {f['from']} to {f['to']}"
        if f.get("undone"):
            return (
                f"{f['gang']} is {f['from']} again: its move to {f['to']} exceeded the time limit"
            )
        if f.get("policy") in SPEEDUP_RULES:
            times = f"rollout {float(f['rollout_s']):.2f} s, training {float(f['train_s']):.2f} s"
            return f"{line}: {times} a step"
        return f"{line} ({f.get('policy', '')})"
    if is_unexpected_exit(event):
        error, count = failure_text(f.get("error", {})), int(f.get("times", 1))
        how = f"exited with {error}" if error else f"exited ({f['why']})"
        often = f", {count} times so far" if count > 1 else ""
        then = "it will not restart" if f.get("final") else f"it restarts{often}"
        return f"{f['name']} {how}; {then}"
    if event.kind == ADMISSION:
        return f"the job is {f['held']}" if f["held"] else "the job runs"
    if event.kind == "host_lost":
        return f"host {f['host']} is lost, with {', '.join(f['workers']) or 'no worker'}"
    if event.kind == "gpu":
        return gpu_status.format_gpu_event(f)
    if event.kind == "phase" and f["phase"] == Phase.FAILED:
        return f"the job failed: {f['error']}"
    if event.kind == "changed":
        changes = [f"{key} {was} -> {now}" for key, (was, now) in f["changes"].items()]
        return f"from step {int(f['version']) + 1} on: {', '.join(changes)}"
    if event.kind == corruption.CORRUPTION_EVENT:
        return corruption.describe_event(f)
    if event.kind == "storage_full":
        return f"{f['why']} The disk was full for {float(f['seconds']):.0f} s"
    if event.kind == MOVE_OUTCOME_EVENT:
        return move_outcomes.format_move(decode_move_outcome(event.ms, f))
    if event.kind == "epoch":
        return (
            f"redis was unavailable for {float(f.get('away_ms', 0)) / 1000:.0f} s; leases were kept"
        )
    return ""


def should_print(times: int) -> bool:
    """Return True if a repeated event is printed: the more repetitions, the more rarely."""
    return times <= 3 or times & (times - 1) == 0
