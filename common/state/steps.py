"""Step commits, which make weight versions; lineages; and what a checkpoint must hold.

Step n turns version n - 1 into version n; steps count from 1, and `steps_done` equals the version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshrl.common.state.groups import GroupRow, decode_group_row
from meshrl.common.state.jobs import COUNT_FIELDS, Phase, create_job, initial_counters
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import job_prefix

# Groups opened after a checkpoint left no row when Redis was lost; none of their ids is used again.
# More than a lineage opens, and few enough that Lua, which writes numbers with 14 digits, never
# rounds an id.
GROUP_ID_GAP = 1_000_000_000
UNDONE_COUNTS = ("trained", "filtered", "typed_drops")  # ends that an older checkpoint undoes


@dataclass(frozen=True)
class StepCommitResult:
    """The answer to the commit of a step: the version that it made."""

    version: int
    replayed: bool  # the step was on record already, with the same manifest


@dataclass(frozen=True)
class StepRecord:
    """What a replay of a step needs; kept until a checkpoint covers it."""

    step: int
    manifest: str
    checkpoint: str
    groups: list[GroupRow]
    filtered: list[int]  # ids of those of `groups` that were left out
    record: dict[str, Any]


@dataclass(frozen=True)
class VersionReferences:
    """Names of a version: its manifest, its checkpoint, and the identities of what is published and
    of what is trained (`common/weights/layout/identity.py`).
    """

    manifest: str
    checkpoint: str
    image: str = ""
    masters: str = ""


@dataclass(frozen=True)
class StepCommit:
    """All that the commit of one step writes.

    `groups` and `filtered_groups` together are all that were leased for the step (an id may be in
    both). `record` is what a replay needs beside the groups; records of steps up to `covered`, the
    version that a durable checkpoint holds, are freed.
    """

    step: int
    groups: Sequence[int]
    filtered_groups: Sequence[int]
    references: VersionReferences
    metrics: dict[str, Any]
    replay_data: dict[str, Any]
    covered: int = -1


async def commit_initial(
    state: StateClient,
    job: str,
    trainer: str,
    token: int,
    lineage: int,
    references: VersionReferences,
) -> None:
    """Commits version 0. Idempotent by manifest; Refused when the job began from other weights,
    Fenced without the lease.
    """
    args = {"trainer": trainer, "token": token, "lineage": lineage} | asdict(references)
    await state.run_job_script("commit_initial", job, **args)


async def commit_step(
    state: StateClient, job: str, trainer: str, token: int, lineage: int, commit: StepCommit
) -> StepCommitResult:
    """Makes version `step` current and ends its groups, once per (job, lineage, step). Fenced
    without the lease; Refused when the step is not next, or committed with another manifest.
    """
    answer = await state.run_job_script(
        "commit_step",
        job,
        trainer=trainer,
        token=token,
        lineage=lineage,
        step=commit.step,
        groups=sorted({*commit.groups, *commit.filtered_groups}),
        filtered=list(commit.filtered_groups),
        metrics=json.dumps(commit.metrics),
        metrics_field=json.dumps({"metrics": commit.metrics}),
        record=json.dumps(commit.replay_data),
        covered=commit.covered,
        **asdict(commit.references),
    )
    return StepCommitResult(answer["version"], answer["replayed"])


async def record_checkpoint(
    state: StateClient, job: str, trainer: str, token: int, lineage: int, step: int, checkpoint: str
) -> None:
    """A durable checkpoint holds version `step`, which is current: the job goes on from it. Refused
    when it is not current, Fenced without the lease.
    """
    args = {"trainer": trainer, "token": token, "lineage": lineage}
    args |= {"step": step, "checkpoint": checkpoint}
    await state.run_script("cover", [job_prefix(job)], args)


async def read_step_rows(state: StateClient, job: str, after_step: int = 0) -> list[dict[str, Any]]:
    """A row for each step after `after_step` that is still there (see `readers.trim`), in order:
    its metrics, and step, lineage, manifest, checkpoint, committed_ms, the trajectories that its
    groups count for in the account (`trained` and `filtered_trajectories`; the metrics' own
    `filtered` counts groups), and `failed_share`: of those that have ended since the step before,
    the share without a reward.
    """
    rows = (await state.run_job_script("step_rows", job, since=after_step))["rows"]
    return [decode_step_row(row) for row in rows or []]


def decode_step_row(row: Mapping[str, str]) -> dict[str, Any]:
    """Return a step's row of `metrics.jsonl` from its hash in Redis."""
    metrics: dict[str, Any] = json.loads(row["metrics"])
    return (
        metrics
        | {key: int(row[key]) for key in ("step", "lineage", "committed_ms", "trained")}
        | {"filtered_trajectories": int(row["filtered"])}
        | {key: row[key] for key in ("manifest", "checkpoint")}
        | {key: row[key] for key in ("image", "masters") if row.get(key)}
        | {"failed_share": int(row.get("failed", 0)) / max(1, int(row.get("ended", 0)))}
    )


async def read_step_records(state: StateClient, job: str, after_step: int = 0) -> list[StepRecord]:
    """What a replay from version `after_step` needs, in order; steps that a checkpoint covers are
    not among them.
    """
    rows = (await state.run_job_script("step_rows", job, since=after_step))["rows"]
    found = []
    for row in rows or []:
        if "record" in row:
            groups = json.loads(row["groups"])
            left_out = [g["group"] for g in groups if g["state"].startswith("filtered")]
            named = int(row["step"]), row["manifest"], row["checkpoint"]
            record = json.loads(row["record"])
            found.append(StepRecord(*named, [*map(decode_group_row, groups)], left_out, record))
    return found


async def open_lineage(
    state: StateClient,
    job: str,
    trainer: str,
    token: int,
    version: int,
    references: VersionReferences,
    op_id: str,
    account: dict[str, Any] | None = None,
) -> int:
    """Goes back to a checkpoint under a new lineage, whose number is returned; later steps are
    abandoned.

    Their groups are ready again. `version` and `references` are those of the weights that the
    checkpoint holds. With its `account` it may be older than the one that covers the job's steps:
    nothing is left of what those trained. It counts as host_lost, and each prompt that was given
    out since, and is neither in flight nor waiting, goes back to the cursor. Refused without.
    """
    args: dict[str, Any] = {
        "job": job,
        "trainer": trainer,
        "token": token,
        "version": version,
        "op": op_id,
        **asdict(references),
    }
    if account is not None:  # that of version 0 tells nothing: nothing was opened before
        counts = account.get("counts", {})
        args["back"] = {
            "counts": {field: counts.get(field, 0) for field in UNDONE_COUNTS},
            "cursor": account.get("cursor", 0),
            "requeue": account.get("requeue", []),
        }
    return int((await state.run_script("open_lineage", [job_prefix(job)], args))["lineage"])


async def read_checkpoint_state(
    state: StateClient, job: str, groups: Sequence[int] = (), filtered_groups: Sequence[int] = ()
) -> dict[str, Any]:
    """What a checkpoint's manifest must hold for `restore_job`, read at one instant.

    With the groups of the step at hand it is the state that the step's commit will leave, since a
    checkpoint is written before the commit that names it. The writer adds `manifest` (of the
    weights) and `checkpoint` (its name).
    """
    found: dict[str, Any] = await state.run_job_script(
        "checkpoint_state",
        job,
        groups=sorted({*groups, *filtered_groups}),
        filtered=list(filtered_groups),
        counts=list(COUNT_FIELDS),
    )
    return found | {"requeue": found["requeue"] or [], "steps_done": max(found["version"], 0)}


async def restore_job(
    state: StateClient,
    job: str,
    document: dict[str, Any],
    run_dir: str,
    checkpoint: dict[str, Any],
    last_lineage: int = 0,
) -> None:
    """After the loss of Redis: the job as its checkpoint has it, in a new lineage, above that of
    the checkpoint and above `last_lineage`, the highest that anything else tells of.

    Prompts that were in flight go back to the cursor and their trajectories count as `host_lost`.
    Ids of groups rise with lineages. Once per new lineage.
    """
    lineage = max(checkpoint["lineage"], last_lineage) + 1
    version, size = checkpoint["version"], document["algorithm"]["groups_per_step"]
    counts = dict(checkpoint["counts"])
    counts["host_lost"] += checkpoint["in_flight"]
    past = max(checkpoint["next_group"] // GROUP_ID_GAP + 1, lineage)
    counters = {
        "lineage": lineage,
        "version": version,
        "manifest": checkpoint["manifest"],
        "checkpoint": checkpoint.get("checkpoint", ""),
        "steps_done": version,
        "covered": version,
        "cursor": checkpoint["cursor"],
        "next_group": past * GROUP_ID_GAP,
        "admitted": version * size,
        "counts": counts,
        "requeue": checkpoint["requeue"],
        "kept": checkpoint.get("kept", {})
        | {key: checkpoint.get(key, "") for key in ("image", "masters")},
    }
    phase = Phase.TRAINING if version < document["budget"]["steps"] else Phase.EVALUATION
    op_id = f"restore-{lineage}-{version}"
    details = {"counts": counts}
    await create_job(state, job, document, run_dir, op_id, phase, counters, details)


async def restart_job(
    state: StateClient, job: str, document: dict[str, Any], run_dir: str, last_lineage: int
) -> None:
    """After the loss of Redis before the first checkpoint that has an account: the job from its
    beginning, in a lineage above `last_lineage`. Once per new lineage.
    """
    lineage = last_lineage + 1
    counters = initial_counters() | {"lineage": lineage, "next_group": lineage * GROUP_ID_GAP}
    op_id, details = f"restart-{lineage}", {"counts": counters["counts"]}
    await create_job(state, job, document, run_dir, op_id, Phase.QUEUED, counters, details)
