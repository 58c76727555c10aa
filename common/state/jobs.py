"""Rows of jobs: the submitted document, the phase, the counters, the evaluations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

from meshrl.common.base.errors import NotFound
from meshrl.common.base.type_hints import resolve_hints
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import MESH_PREFIX, job_prefix

JOBS = f"{MESH_PREFIX}:jobs"
COUNT_FIELDS = ("opened", "trained", "filtered", "stale_requeued", "host_lost", "typed_drops")


class Phase(StrEnum):
    """Phase of a job. Phases follow each other in this order; the last three are terminal."""

    QUEUED = "queued"
    WARM_START = "warm_start"
    BASELINE = "baseline"  # version 0 is evaluated
    TRAINING = "training"
    EVALUATION = "evaluation"  # of the last version
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


def format_phase(phase: str, document: Mapping[str, Any]) -> str:
    """Return a job's phase for people: without demonstrations no warm start precedes version 0."""
    if phase == Phase.WARM_START and not document.get("warm_start", {}).get("demonstrations"):
        return "preparing the model"
    return phase.replace("_", " ")


# shards work on the job
ACTIVE_PHASES = frozenset({Phase.BASELINE, Phase.TRAINING, Phase.EVALUATION})
PAUSED_PREFIX = "paused:"  # prefix of `block_reason` of a paused job
EARLY_STOP_KEYS = frozenset({"evaluation.patience", "budget.steps"})  # whose change undoes one
TERMINAL_PHASES = frozenset({Phase.FINISHED, Phase.FAILED, Phase.STOPPED})


@dataclass(frozen=True)
class JobRow:
    """Row of a job in Redis. Counts are in trajectories."""

    id: str
    phase: Phase
    document: dict[str, Any]  # the resolved job file
    run_dir: str
    lineage: int
    version: int  # -1 before the first weights
    manifest: str  # digest of the current version
    checkpoint: str  # from which a recovery replays
    steps_done: int
    cursor: int  # the next unused prompt
    admitted: int  # groups, less those refunded
    opened: int
    trained: int
    filtered: int
    stale_requeued: int
    host_lost: int
    typed_drops: int
    error: str
    image: str = ""  # identity of the published current version; empty: not reported
    masters: str = ""  # identity of its float32 masters
    initial_manifest: str = ""  # manifest of version 0, once there is one
    best_version: int = -1  # by `evaluation.best`; -1: none
    best_manifest: str = ""
    progress_ms: int = 0  # time of the last progress: a group, a step, an evaluation, a phase
    slowest_progress_ms: int = 0  # about the longest recent time between progress
    block_reason: str = (
        ""  # block reason, `waiting: WHY` or `paused: WHY`; empty: it runs, or has ended
    )
    blocked_since_ms: int = 0  # since when it is blocked for this reason
    budget_steps: int = 0  # last step; below budget.steps after an early stop. 0: not recorded
    early_stop: int = -1  # version whose evaluation used up evaluation.patience; -1: none
    # of a step: time until the engines on the core's workers hand over; -1: no limit
    seed_ms: int = -1
    created_ms: int = 0  # time of its submission: distinguishes it from an earlier job of its name

    @property
    def phase_text(self) -> str:
        """Phase for people."""
        return format_phase(self.phase, self.document)

    @property
    def last_step(self) -> int:
        """Number of the job's last step."""
        return self.budget_steps or int(self.document["budget"]["steps"])

    @property
    def is_terminal(self) -> bool:
        """True if the job has finished, failed or stopped."""
        return self.phase in TERMINAL_PHASES

    @property
    def is_paused(self) -> bool:
        """True if the job is paused: its deadlines, sessions and stall checks are suspended."""
        return self.block_reason.startswith(PAUSED_PREFIX)


_FIELD_TYPES = resolve_hints(JobRow)


async def submit(
    state: StateClient, job: str, document: dict[str, Any], run_dir: str, op_id: str
) -> None:
    """Record a job as queued. Refused if the mesh has a job of this name."""
    await create_job(state, job, document, run_dir, op_id, Phase.QUEUED, initial_counters())


def initial_counters() -> dict[str, Any]:
    """Return the counters of a new job."""
    return {
        "lineage": 0,
        "version": -1,
        "manifest": "",
        "checkpoint": "",
        "steps_done": 0,
        "checkpointed_version": -1,
        "cursor": 0,
        "next_group": 0,
        "admitted": 0,
        "counts": dict.fromkeys(COUNT_FIELDS, 0),
        "requeue": [],
    }


async def create_job(
    state: StateClient,
    job: str,
    document: dict[str, Any],
    run_dir: str,
    op_id: str,
    phase: Phase,
    counters: dict[str, Any],
    restored_details: dict[str, Any] | None = None,
) -> None:
    """Write a job's row with initial counters.

    The event is `submitted`, or `restored` with `restored_details`.
    """
    algorithm = document["algorithm"]
    args = counters | {
        "job": job,
        "op": op_id,
        **_encode_document(document),
        "run_dir": run_dir,
        "phase": phase,
        "groups_per_step": algorithm["groups_per_step"],
        "group_size": algorithm["group_size"],
        "max_staleness": algorithm["max_staleness"],
        "budget_steps": document["budget"]["steps"],
        "why": "submitted" if restored_details is None else "restored",
        "extra": json.dumps(restored_details or {}),
    }
    await state.run_script("submit", [job_prefix(job)], args)


async def read_jobs(state: StateClient) -> list[JobRow]:
    """Return all jobs of the mesh in the order of submission."""
    args = {"index": JOBS, "prefix": "{", "suffix": "}:job", "extra_key": "}:submission"}
    rows = (await state.run_mesh_script("read_rows", **args))["rows"]
    return [_decode_job(row) for row in rows or []]


async def read_job(state: StateClient, job: str) -> JobRow:
    """Return one job; NotFound if the mesh has none of that name."""
    prefix = job_prefix(job)
    args = {"key": f"{prefix}:job", "extra_key": f"{prefix}:submission"}
    row = (await state.run_script("read_row", [prefix], args))["row"]
    if not row or "phase" not in row:
        raise NotFound(
            f"there is no job {job}", fix="Run `meshrl status` to list the jobs of this mesh."
        )
    return _decode_job(row | {"id": job})


async def set_phase(
    state: StateClient,
    job: str,
    phase: Phase,
    token: int,
    name: str,
    error: str = "",
    lineage: int | None = None,
) -> None:
    """Move a job to a later phase; Fenced without the live lease (name, token), Refused for a step
    back.

    With `lineage`, nothing happens unless the job is still in that lineage.
    """
    args = {"job": job, "phase": phase, "name": name, "token": token, "error": error}
    if lineage is not None:
        args["lineage"] = lineage
    await state.run_script("set_phase", [job_prefix(job)], args)


async def reopen(state: StateClient, job: str, op_id: str) -> None:
    """Resume a stopped or failed job where it was; Refused if it has finished."""
    await state.run_job_script("reopen", job, op=op_id)


async def cancel(state: StateClient, job: str, op_id: str) -> bool:
    """Stop a job for a user, who holds no lease; False if it had ended already.

    `reopen` resumes it where it was. NotFound if the mesh has none of that name.
    """
    done = await state.run_job_script("cancel", job, op=op_id)
    return bool(done["cancelled"])


async def change_document(
    state: StateClient,
    job: str,
    document: dict[str, Any],
    changes: dict[str, tuple[Any, Any]],
    op_id: str,
) -> bool:
    """Replace the document of a job that no process works on, from the next step on.

    Return True if a job that had done all its steps has more to do now. The event `changed`
    contains `changes`: (old, new) by key.
    """
    answer = await state.run_job_script(
        "change_document",
        job,
        op=op_id,
        **_encode_document(document),
        budget_steps=document["budget"]["steps"],
        max_staleness=document["algorithm"]["max_staleness"],
        undoes_early_stop=not changes.keys().isdisjoint(EARLY_STOP_KEYS),
        extra=json.dumps({"changes": changes}),
    )
    return bool(answer["extended"])


@dataclass(frozen=True)
class EvaluationRecord:
    """Result of version `step` of a lineage under a tag.

    `value` is the figure of merit: the highest so far, of the current version, makes that version
    the best one.
    """

    tag: str
    lineage: int
    step: int
    result: dict[str, Any]
    value: float | None = None
    patience: int = 0  # evaluations without a better version that end the job; 0: any number


async def record_evaluation(
    state: StateClient, job: str, evaluation: EvaluationRecord, name: str, token: int
) -> bool:
    """Record a result, once for its tag.

    Return False if the tag has a result, or the job is in another lineage. Fenced without the lease
    (name, token).
    """
    args = {
        "job": job,
        "tag": evaluation.tag,
        "lineage": evaluation.lineage,
        "step": evaluation.step,
        "result": json.dumps(evaluation.result),
        "patience": evaluation.patience,
        "name": name,
        "token": token,
    }
    if evaluation.value is not None:
        args["value"] = evaluation.value
    return bool((await state.run_script("record_evaluation", [job_prefix(job)], args))["recorded"])


async def is_evaluation_pending(state: StateClient, job: str, tag: str) -> bool:
    """Return True if a result under `tag` is still possible: none is recorded, and the job has not
    ended.
    """
    found = await state.run_job_script("evaluation_status", job, tag=tag)
    return not found["recorded"] and found["phase"] not in TERMINAL_PHASES


async def is_paused(state: StateClient, job: str) -> bool:
    """Return True if a job is paused, by one cheap command; False if there is none of that name."""
    return await state.run_command("ZSCORE", f"{MESH_PREFIX}:jobs:paused", job) is not None


async def read_evaluations(state: StateClient, job: str) -> list[dict[str, Any]]:
    """Return `{tag, step, at_ms, by, result}` of each evaluation, by step."""
    prefix = job_prefix(job)
    rows = (await state.run_script("read_row", [prefix], {"key": f"{prefix}:evaluations"}))["row"]
    found = [json.loads(row) for row in (rows or {}).values()]
    return sorted(
        (row | {"result": json.loads(row["result"])} for row in found),
        key=lambda row: (row["step"], row["at_ms"]),
    )


def _encode_document(document: dict[str, Any]) -> dict[str, str]:
    text = json.dumps(document)
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return {"document": text, "digest": digest}


@lru_cache(maxsize=16)  # rows are read several times a second, documents rarely change
def _decode_document(text: str) -> dict[str, Any]:
    """Return the parsed document. It is read-only: all rows of a job share it."""
    found: dict[str, Any] = json.loads(text)
    return found


def _decode_job(row: dict[str, str]) -> JobRow:
    known: dict[str, Any] = {name: row[name] for name in _FIELD_TYPES if name in row}
    numbers = {name: int(value) for name, value in known.items() if _FIELD_TYPES[name] is int}
    typed = {"phase": Phase(row["phase"]), "document": _decode_document(row["document"])}
    return JobRow(**known | numbers | typed)
