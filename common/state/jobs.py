"""The rows of jobs: what was submitted, the phase, the counters, the evaluations."""

from __future__ import annotations

import hashlib
import json
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
    """Where a job is; phases follow each other in this order, and the last three end it."""

    QUEUED = "queued"
    WARM_START = "warm_start"
    BASELINE = "baseline"  # version 0 is evaluated
    TRAINING = "training"
    EVALUATION = "evaluation"  # of the last version
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


ACTIVE_PHASES = frozenset(
    {Phase.BASELINE, Phase.TRAINING, Phase.EVALUATION}
)  # shards work on the job
PAUSED_PREFIX = "paused:"  # how `held` begins of a job that is paused
TERMINAL_PHASES = frozenset({Phase.FINISHED, Phase.FAILED, Phase.STOPPED})


@dataclass(frozen=True)
class JobRow:
    """The row of a job in Redis. Counts are in trajectories."""

    id: str
    phase: Phase
    document: dict[str, Any]  # the resolved job file
    run_dir: str
    lineage: int
    version: int  # -1 before the first weights
    manifest: str  # digest of the current version
    checkpoint: str  # what a recovery would replay from
    steps_done: int
    cursor: int  # the next prompt that nobody has seen
    admitted: int  # groups, less those refunded
    opened: int
    trained: int
    filtered: int
    stale_requeued: int
    host_lost: int
    typed_drops: int
    error: str
    image: str = ""  # identity of the current version as it is published; empty: nobody told it
    masters: str = ""  # identity of its float32 masters
    initial_manifest: str = ""  # manifest of version 0, once there is one
    best_version: int = -1  # by `evaluation.best`; -1: none yet
    best_manifest: str = ""
    progress_ms: int = 0  # when it last came further: a group, a step, an evaluation, a phase
    slowest_ms: int = 0  # about the longest time that this took lately
    held: str = ""  # `waiting: WHY` or `paused: WHY`; empty: it runs, or has ended
    held_ms: int = 0  # since when it is held so
    since_ms: int = 0  # when it came on record: tells it from an earlier job of its name

    @property
    def is_terminal(self) -> bool:
        """Whether the job is done, failed or stopped."""
        return self.phase in TERMINAL_PHASES

    @property
    def is_paused(self) -> bool:
        """Whether it is planned asleep: its deadlines, sessions and stall checks stand still."""
        return self.held.startswith(PAUSED_PREFIX)


_FIELD_TYPES = resolve_hints(JobRow)


async def submit(
    state: StateClient, job: str, document: dict[str, Any], run_dir: str, op_id: str
) -> None:
    """Puts a job on record, queued. Refused when the mesh has one of this name."""
    await create_job(state, job, document, run_dir, op_id, Phase.QUEUED, initial_counters())


def initial_counters() -> dict[str, Any]:
    """The counters of a job that has done nothing."""
    return {
        "lineage": 0,
        "version": -1,
        "manifest": "",
        "checkpoint": "",
        "steps_done": 0,
        "covered": -1,
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
    """Writes a job's row with the counters it begins with, and the event `submitted`, or `restored`
    with what is told of that.
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
    """All jobs of the mesh, in the order in which they were submitted."""
    args = {"index": JOBS, "prefix": "{", "suffix": "}:job", "beside": "}:given"}
    rows = (await state.run_mesh_script("rows", **args))["rows"]
    return [_decode_job(row) for row in rows or []]


async def read_job(state: StateClient, job: str) -> JobRow:
    """One job; NotFound when the mesh has none of that name."""
    prefix = job_prefix(job)
    args = {"key": f"{prefix}:job", "beside": f"{prefix}:given"}
    row = (await state.run_script("row", [prefix], args))["row"]
    if not row or "phase" not in row:
        raise NotFound(f"there is no job {job}", fix="`meshrl status` lists the jobs of this mesh.")
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
    """Moves a job forward; Fenced without the live lease (name, token), Refused for a step back.

    `lineage`: nothing happens unless the job is still in it.
    """
    args = {"job": job, "phase": phase, "name": name, "token": token, "error": error}
    if lineage is not None:
        args["lineage"] = lineage
    await state.run_script("phase", [job_prefix(job)], args)


async def reopen(state: StateClient, job: str, op_id: str) -> None:
    """Lets a job that was stopped or failed go on where it was; Refused when it has finished."""
    await state.run_job_script("reopen", job, op=op_id)


async def cancel(state: StateClient, job: str, op_id: str) -> bool:
    """Stops a job for a person, who holds no lease; False when it had ended already. `reopen` lets
    it go on where it was. NotFound when the mesh has none of that name.
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
    """Gives a job that no process works on another document, from the step after its version on;
    True when one that had done all its steps has more to do now. The event `changed` tells of
    `changes`, (was, now) by key.
    """
    answer = await state.run_job_script(
        "change",
        job,
        op=op_id,
        **_encode_document(document),
        budget_steps=document["budget"]["steps"],
        max_staleness=document["algorithm"]["max_staleness"],
        extra=json.dumps({"changes": changes}),
    )
    return bool(answer["extended"])


@dataclass(frozen=True)
class EvaluationRecord:
    """The result of version `step` of a lineage under a tag. `value` is the figure that the job is
    judged by: the highest so far, of the current version, makes that the best version.
    """

    tag: str
    lineage: int
    step: int
    result: dict[str, Any]
    value: float | None = None


async def record_evaluation(
    state: StateClient, job: str, evaluation: EvaluationRecord, name: str, token: int
) -> bool:
    """Records a result, once for its tag: False when there is one already, or the job is in another
    lineage by now. Fenced without the lease (name, token).
    """
    args = {
        "job": job,
        "tag": evaluation.tag,
        "lineage": evaluation.lineage,
        "step": evaluation.step,
        "result": json.dumps(evaluation.result),
        "name": name,
        "token": token,
    }
    if evaluation.value is not None:
        args["value"] = evaluation.value
    return bool((await state.run_script("evaluation", [job_prefix(job)], args))["recorded"])


async def is_evaluation_pending(state: StateClient, job: str, tag: str) -> bool:
    """Whether a result under `tag` may still come: there is none, and the job has not ended."""
    found = await state.run_job_script("evaluated", job, tag=tag)
    return not found["recorded"] and found["phase"] not in TERMINAL_PHASES


async def is_paused(state: StateClient, job: str) -> bool:
    """Whether a job is paused, for who asks often; False when there is none of that name."""
    return await state.run_command("ZSCORE", f"{MESH_PREFIX}:jobs:paused", job) is not None


async def read_evaluations(state: StateClient, job: str) -> list[dict[str, Any]]:
    """`{tag, step, at_ms, by, result}` of each evaluation, by step."""
    prefix = job_prefix(job)
    rows = (await state.run_script("row", [prefix], {"key": f"{prefix}:evaluations"}))["row"]
    found = [json.loads(row) for row in (rows or {}).values()]
    return sorted(
        (row | {"result": json.loads(row["result"])} for row in found),
        key=lambda row: (row["step"], row["at_ms"]),
    )


def _encode_document(document: dict[str, Any]) -> dict[str, str]:
    text = json.dumps(document)
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return {"document": text, "digest": digest}


@lru_cache(maxsize=16)  # rows are read several times a second, documents hardly ever change
def _decode_document(text: str) -> dict[str, Any]:
    """For reading: all rows of a job share it."""
    found: dict[str, Any] = json.loads(text)
    return found


def _decode_job(row: dict[str, str]) -> JobRow:
    known: dict[str, Any] = {name: row[name] for name in _FIELD_TYPES if name in row}
    numbers = {name: int(value) for name, value in known.items() if _FIELD_TYPES[name] is int}
    typed = {"phase": Phase(row["phase"]), "document": _decode_document(row["document"])}
    return JobRow(**known | numbers | typed)
