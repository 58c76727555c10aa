"""Rows of groups, from admission to a step: staleness gate, shards' segments, trainer leases.

Group ids are per job and rise in the order in which groups were opened. `shard` and `trainer` are
registry names, and each call is fenced by the caller's lease on that name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from meshrl.common.base.lineages import SINGLE_LINEAGE
from meshrl.common.base.type_hints import resolve_hints
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import job_prefix


@dataclass(frozen=True)
class AdmittedGroup:
    """Group that may be sampled; `prompt` counts through the data set, epoch after epoch."""

    group: int
    prompt: int
    version: int  # current at its admission, or the last one of its lineage if that has ended since
    lineage: int  # the job's current lineage


@dataclass(frozen=True)
class GroupRow:
    """Finished group that the trainer leased."""

    group: int
    shard: str
    prompt: int
    version: int
    samples: int
    scored: int  # members with a reward; the others failed by a typed error
    digest: str  # of its bytes in the weight store
    nbytes: int
    min_version: int  # oldest weights that sampled one of its tokens
    abandoned_above: int = SINGLE_LINEAGE  # tokens of later versions belong to an abandoned lineage


_FIELD_TYPES = resolve_hints(GroupRow)


@dataclass(frozen=True)
class FinishedGroup:
    """Digest and size of a finished group's bytes in the weight store, and fields of its row."""

    group: int
    digest: str
    nbytes: int
    min_version: int  # oldest weights that sampled one of its tokens
    scored: int  # members with a reward


@dataclass(frozen=True)
class LeaseWait:
    """Reason why the trainer gets no group now."""

    reason: str
    shard: str  # the shard that the trainer waits for; empty when no group is open


@dataclass(frozen=True)
class LeasedGroups:
    """Answer to a lease of groups."""

    groups: list[GroupRow]  # so far, without `known_groups`; oldest first
    wait: LeaseWait | None  # for the rest of the step's groups


@dataclass(frozen=True)
class InFlightCounts:
    """Groups by state, the trajectories in them, and the capacity of the gate."""

    open: int
    ready: int
    leased: int
    samples: int
    admissible_groups: int  # groups; negative after a new lineage opened at an earlier version


async def admit_groups(
    state: StateClient, job: str, shard: str, token: int, max_groups: int, op_id: str
) -> list[AdmittedGroup]:
    """Open up to `max_groups` groups, limited by the gate's capacity.

    None are opened outside the phase `training`. capacity = min(max_staleness + version + 1,
    budget) * groups_per_step - admitted. Requeued prompts go first.
    """
    args = {"shard": shard, "token": token, "want": max_groups, "op": op_id}
    return _decode_admitted(await state.run_job_script("admit_groups", job, **args))


async def mark_group_ready(
    state: StateClient, job: str, shard: str, token: int, finished: FinishedGroup, op_id: str
) -> None:
    """Record that the group is finished and its bytes are durable: it may be trained on."""
    await state.run_job_script(
        "mark_group_ready", job, shard=shard, token=token, op=op_id, **asdict(finished)
    )


async def drop_group(
    state: StateClient, job: str, shard: str, token: int, group: int, reason: str, op_id: str
) -> None:
    """Record that too many members failed by typed errors.

    The admission returns, the prompt does not; counts `typed_drops`.
    """
    ends = reason, "typed_drops", "dropped", False
    await _return_group(state, job, shard, token, group, op_id, *ends)


async def requeue_lost_group(
    state: StateClient, job: str, shard: str, token: int, group: int, reason: str, op_id: str
) -> None:
    """Record that the group is lost (host_lost, environment_lost, poisoned).

    Admission and prompt return; counts `host_lost`. The trainer may record this too, under its own
    name, for a group that it has leased.
    """
    ends = reason, "host_lost", "requeued", True
    await _return_group(state, job, shard, token, group, op_id, *ends)


async def filter_group(
    state: StateClient, job: str, trainer: str, token: int, group: int, op_id: str
) -> None:
    """Record that a leased group has no training signal; another group takes its place.

    The admission returns, the prompt does not; counts `filtered`, and failed members as
    `typed_drops`.
    """
    ends = "filtered", "filtered", "filtered", False
    await _return_group(state, job, trainer, token, group, op_id, *ends)


async def requeue_stale_group(
    state: StateClient, job: str, trainer: str, token: int, group: int, op_id: str
) -> None:
    """Record that the tokens of a leased group are staler than its row states.

    Admission and prompt return; counts `stale_requeued`.
    """
    ends = "stale", "stale_requeued", "stale", True
    await _return_group(state, job, trainer, token, group, op_id, *ends)


async def read_open_groups(state: StateClient, job: str, shard: str) -> list[AdmittedGroup]:
    """Return the groups that the shard has to finish, its predecessor's included, oldest first."""
    return _decode_admitted(await state.run_job_script("open_groups", job, shard=shard))


async def claim_shard(state: StateClient, job: str, shard: str, token: int) -> dict[str, int]:
    """Take over the shard; return its segments: name -> sealed length, -1 while open."""
    found = (await state.run_job_script("claim_shard", job, shard=shard, token=token))["segments"]
    return {name.removeprefix("segment:"): int(length) for name, length in (found or {}).items()}


async def record_segment(
    state: StateClient, job: str, shard: str, token: int, name: str, sealed_length: int
) -> None:
    """Record a segment before its first byte is written (-1), and its length when it is sealed."""
    args = {"shard": shard, "token": token, "name": name, "sealed_length": sealed_length}
    await state.run_job_script("record_segment", job, **args)


async def read_ledger_location(state: StateClient, job: str, shard: str) -> str:
    """Return the location of the shard's segments, as recorded last; empty: it has had none."""
    key = f"{job_prefix(job)}:shard:{shard}"
    return str(await state.run_command("HGET", key, "place") or "")


async def record_ledger_location(
    state: StateClient, job: str, shard: str, token: int, location: str
) -> None:
    """Record the new location of the shard's segments."""
    await state.run_job_script("record_segment", job, shard=shard, token=token, place=location)


async def remove_segment(state: StateClient, job: str, shard: str, token: int, name: str) -> None:
    """Remove the record of a segment whose groups have all ended."""
    await state.run_job_script(
        "record_segment", job, shard=shard, token=token, name=name, forget=True
    )


async def lease_groups(
    state: StateClient,
    job: str,
    trainer: str,
    token: int,
    step: int,
    known_groups: Iterable[int] = (),
) -> LeasedGroups:
    """Lease the groups of step `step`, which turns version step - 1 into version step.

    Steps count from 1. Groups that are ready are leased at once. The same trainer and step get the
    same groups again, with more, so no operation id is needed. Stale groups are requeued: a token
    of an abandoned version counts as old as the version at which its lineage ended. The answer
    leaves out `known_groups`, which the trainer has. Refused if `step` is not next.
    """
    args = {"trainer": trainer, "token": token, "step": step, "known": list(known_groups)}
    answer = await state.run_job_script("lease_groups", job, **args)
    waiting = LeaseWait(answer["waiting"], answer["shard"]) if "waiting" in answer else None
    return LeasedGroups([decode_group_row(row) for row in answer["groups"] or []], waiting)


async def count_in_flight(state: StateClient, job: str) -> InFlightCounts:
    """Return the groups in flight, counted from their rows, for accounting and the live view."""
    return InFlightCounts(**await state.run_job_script("in_flight", job))


async def read_live_digests(state: StateClient, job: str) -> set[str]:
    """Return the digests of the bytes of groups that a step, or its replay, may still need."""
    return set((await state.run_job_script("live_digests", job))["digests"] or [])


def decode_group_row(row: dict[str, Any]) -> GroupRow:
    """Return a GroupRow from the hash in Redis."""
    known = {name: row[name] for name in _FIELD_TYPES if name in row}
    return GroupRow(**{name: _FIELD_TYPES[name](value) for name, value in known.items()})


async def _return_group(
    state: StateClient, job: str, name: str, token: int, group: int, op_id: str, *ends: str | bool
) -> None:
    """Return a group's admission; `ends` is (reason, counter, kind of the event, requeue the
    prompt).
    """
    args = {"job": job, "name": name, "token": token, "group": group, "op": op_id}
    args |= dict(zip(("reason", "counter", "kind", "requeue"), ends, strict=True))
    await state.run_script("return_group", [job_prefix(job)], args)


def _decode_admitted(answer: dict[str, Any]) -> list[AdmittedGroup]:
    return [AdmittedGroup(**row) for row in answer["groups"] or []]
