"""Step commits, which make weight versions; lineages; contents of checkpoints.

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

# Groups opened after a checkpoint leave no row when Redis is lost: their ids are skipped. The gap
# is more than a lineage opens, and small enough that Lua, which writes numbers with 14 digits,
# never rounds an id.
GROUP_ID_GAP = 1_000_000_000
UNDONE_COUNTS = ("trained", "filtered", "typed_drops")  # counters that an older checkpoint resets


@dataclass(frozen=True)
class StepCommitResult:
    """Result of a step commit: the version that it made."""

    version: int
    is_replay: bool  # the step was recorded already, with the same manifest


@dataclass(frozen=True)
class StepRecord:
    """Record that a replay of a step needs, kept until a checkpoint covers the step."""

    step: int
    manifest: str
    checkpoint: str
    groups: list[GroupRow]
    filtered: list[int]  # ids of the filtered groups among `groups`
    replay_data: dict[str, Any]


@dataclass(frozen=True)
class VersionReferences:
    """References of a version: its manifest, its checkpoint, and identities of its weights.

    `image` identifies the published weights, `masters` the trained float32 weights
    (`common/weights/layout/identity.py`).
    """

    manifest: str
    checkpoint: str
    image: str = ""
    masters: str = ""


@dataclass(frozen=True)
class StepCommit:
    """Contents of one step's commit.

    `groups` and `filtered_groups` together are all groups leased for the step (an id may be in
    both). `replay_data` is what a replay needs beside the groups. `checkpointed_version` is the
    version in a durable checkpoint: replay records of steps up to it are freed.
    """

    step: int
    groups: Sequence[int]
    filtered_groups: Sequence[int]
    references: VersionReferences
    metrics: dict[str, Any]
    replay_data: dict[str, Any]
    checkpointed_version: int = -1


async def commit_initial(
    state: StateClient,
    job: str,
    trainer: str,
    token: int,
    lineage: int,
    references: VersionReferences,
) -> None:
    """Commit version 0, idempotent by manifest.

    Refused if the job began from other weights, Fenced without the lease.
    """
    args = {"trainer": trainer, "token": token, "lineage": lineage} | asdict(references)
    await state.run_job_script("commit_initial", job, **args)


async def commit_step(
    state: StateClient, job: str, trainer: str, token: int, lineage: int, commit: StepCommit
) -> StepCommitResult:
    """Make version `step` current and end its groups, once per (job, lineage, step).

    Fenced without the lease; Refused if the step is not next, or committed with another manifest.
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
        checkpointed_version=commit.checkpointed_version,
        **asdict(commit.references),
    )
    return StepCommitResult(answer["version"], answer["is_replay"])


async def record_checkpoint(
    state: StateClient, job: str, trainer: str, token: int, lineage: int, step: int, checkpoint: str
) -> None:
    """Record that a durable checkpoint holds the current version `step`.

    The job resumes from it. Refused if the version is not current, Fenced without the lease.
    """
    args = {"trainer": trainer, "token": token, "lineage": lineage}
    args |= {"step": step, "checkpoint": checkpoint}
    await state.run_script("record_checkpoint", [job_prefix(job)], args)


async def read_step_rows(state: StateClient, job: str, after_step: int = 0) -> list[dict[str, Any]]:
    """Return a row for each step after `after_step` that is not trimmed (`readers.trim_events`), in
    order.

    A row has the step's metrics, and step, lineage, manifest, checkpoint and committed_ms.
    `trained` and `filtered_trajectories` are the trajectories that its groups count for in the
    account; the metrics' own `filtered` counts groups. `failed_share` is the share without a reward
    among the trajectories that ended since the step before.
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
    """Return the records for a replay from version `after_step`, in order.

    Steps that a checkpoint covers are left out.
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
    """Return to a checkpoint under a new lineage and return its number; later steps are abandoned.

    The groups of abandoned steps are ready again. `version` and `references` are those of the
    checkpoint's weights. With its `account` the checkpoint may be older than the one that covers
    the job's steps: their groups are gone. These count as host_lost, and each prompt issued since
    that is neither in flight nor waiting returns to the cursor. Without `account` this is Refused.
    """
    args: dict[str, Any] = {
        "job": job,
        "trainer": trainer,
        "token": token,
        "version": version,
        "op": op_id,
        **asdict(references),
    }
    if account is not None:  # that of version 0 is empty: nothing was opened before
        counts = account.get("counts", {})
        args["rollback"] = {
            "counts": {field: counts.get(field, 0) for field in UNDONE_COUNTS},
            "cursor": account.get("cursor", 0),
            "requeue": account.get("requeue", []),
        }
    return int((await state.run_script("open_lineage", [job_prefix(job)], args))["lineage"])


async def read_checkpoint_state(
    state: StateClient, job: str, groups: Sequence[int] = (), filtered_groups: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the job state that a checkpoint's manifest must hold for `restore_job`.

    All fields are read at one instant. With the groups of the current step the result is the state
    after the step's commit, since a checkpoint is written before the commit that names it. The
    writer adds `manifest` (of the weights) and `checkpoint` (its name).
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
    """Restore a job from its checkpoint after the loss of Redis, once per new lineage.

    The new lineage is above that of the checkpoint and above `last_lineage`, the highest in any
    other record. Prompts that were in flight return to the cursor and their trajectories count as
    `host_lost`. Ids of groups rise with lineages.
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
        "checkpointed_version": version,
        "cursor": checkpoint["cursor"],
        "next_group": past * GROUP_ID_GAP,
        "admitted": version * size,
        "counts": counts,
        "requeue": checkpoint["requeue"],
        "retained_fields": checkpoint.get("kept", {})
        | {key: checkpoint.get(key, "") for key in ("image", "masters")},
    }
    last_step = int(checkpoint.get("kept", {}).get("budget_steps", document["budget"]["steps"]))
    phase = Phase.TRAINING if version < last_step else Phase.EVALUATION
    op_id = f"restore-{lineage}-{version}"
    details = {"counts": counts}
    await create_job(state, job, document, run_dir, op_id, phase, counters, details)


async def restart_job(
    state: StateClient, job: str, document: dict[str, Any], run_dir: str, last_lineage: int
) -> None:
    """Restart a job from its beginning after the loss of Redis, once per new lineage.

    This is for jobs without a checkpoint that has an account. The lineage is above `last_lineage`.
    """
    lineage = last_lineage + 1
    counters = initial_counters() | {"lineage": lineage, "next_group": lineage * GROUP_ID_GAP}
    op_id, details = f"restart-{lineage}", {"counts": counters["counts"]}
    await create_job(state, job, document, run_dir, op_id, Phase.QUEUED, counters, details)
