"""The rows of groups, from admission to a step: the staleness gate, shards' segments, leases of the
trainer.

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
    """A group that may be sampled: `prompt` counts through the data set, epoch after epoch."""

    group: int
    prompt: int
    version: int  # current when it was admitted, or where its lineage has ended since
    lineage: int  # the job's current lineage


@dataclass(frozen=True)
class GroupRow:
    """A finished group that the trainer leased."""

    group: int
    shard: str
    prompt: int
    version: int
    samples: int
    scored: int  # members with a reward; the others failed by a typed error
    digest: str  # names its bytes in the weight store
    nbytes: int
    min_version: int  # oldest weights that sampled one of its tokens
    foreign_above: int = SINGLE_LINEAGE  # tokens of later versions are of an abandoned lineage


_FIELD_TYPES = resolve_hints(GroupRow)


@dataclass(frozen=True)
class FinishedGroup:
    """The bytes of a finished group in the store, and what its row says of them."""

    group: int
    digest: str
    nbytes: int
    min_version: int  # oldest weights that sampled one of its tokens
    scored: int  # members with a reward


@dataclass(frozen=True)
class LeaseWait:
    """Why the trainer gets no group now."""

    reason: str
    on: str  # the shard that is waited for; empty when no group is open


@dataclass(frozen=True)
class LeasedGroups:
    """The answer to a lease of groups."""

    groups: list[GroupRow]  # so far, less those that were given before; oldest first
    wait: LeaseWait | None  # for the rest of the step's groups


@dataclass(frozen=True)
class InFlightCounts:
    """Groups by state, the trajectories in them, and what the gate would admit now."""

    open: int
    ready: int
    leased: int
    samples: int
    capacity: int  # groups; negative after a new lineage opened at an earlier version


async def admit_groups(
    state: StateClient, job: str, shard: str, token: int, max_groups: int, op_id: str
) -> list[AdmittedGroup]:
    """Opens up to `max_groups` groups, as many as the gate lets through now: none outside the phase
    `training`.

    capacity = min(max_staleness + version + 1, budget) * groups_per_step - admitted. Prompts that
    were given back go first.
    """
    args = {"shard": shard, "token": token, "want": max_groups, "op": op_id}
    return _decode_admitted(await state.run_job_script("admit", job, **args))


async def mark_group_ready(
    state: StateClient, job: str, shard: str, token: int, finished: FinishedGroup, op_id: str
) -> None:
    """Records that the group is finished and its bytes are durable: it may be trained on."""
    await state.run_job_script(
        "group_ready", job, shard=shard, token=token, op=op_id, **asdict(finished)
    )


async def drop_group(
    state: StateClient, job: str, shard: str, token: int, group: int, reason: str, op_id: str
) -> None:
    """Records that too many members failed by typed errors: the admission returns, the prompt does
    not; counts `typed_drops`.
    """
    ends = reason, "typed_drops", "dropped", False
    await _return_group(state, job, shard, token, group, op_id, *ends)


async def requeue_lost_group(
    state: StateClient, job: str, shard: str, token: int, group: int, reason: str, op_id: str
) -> None:
    """Records that the group is lost (host_lost, environment_lost, poisoned): admission and prompt
    return; counts `host_lost`. The trainer may say so too, under its own name, of a group that it
    has leased.
    """
    ends = reason, "host_lost", "requeued", True
    await _return_group(state, job, shard, token, group, op_id, *ends)


async def filter_group(
    state: StateClient, job: str, trainer: str, token: int, group: int, op_id: str
) -> None:
    """The trainer leased a group that has nothing to teach, and another takes its place: the
    admission returns, the prompt does not; counts `filtered`, and members that failed as
    `typed_drops`.
    """
    ends = "filtered", "filtered", "filtered", False
    await _return_group(state, job, trainer, token, group, op_id, *ends)


async def requeue_stale_group(
    state: StateClient, job: str, trainer: str, token: int, group: int, op_id: str
) -> None:
    """The trainer leased a group whose tokens are staler than its row says: admission and prompt
    return; counts `stale_requeued`.
    """
    ends = "stale", "stale_requeued", "stale", True
    await _return_group(state, job, trainer, token, group, op_id, *ends)


async def read_open_groups(state: StateClient, job: str, shard: str) -> list[AdmittedGroup]:
    """The groups that the shard has to finish, oldest first, its predecessor's among them."""
    return _decode_admitted(await state.run_job_script("open_groups", job, shard=shard))


async def claim_shard(state: StateClient, job: str, shard: str, token: int) -> dict[str, int]:
    """Takes over the shard; returns its segments: name -> sealed length, -1 while open."""
    found = (await state.run_job_script("claim_shard", job, shard=shard, token=token))["segments"]
    return {name.removeprefix("segment:"): int(length) for name, length in (found or {}).items()}


async def record_segment(
    state: StateClient, job: str, shard: str, token: int, name: str, sealed_length: int
) -> None:
    """Records a segment before its first byte is written (-1), and its length when it is sealed."""
    args = {"shard": shard, "token": token, "name": name, "sealed_length": sealed_length}
    await state.run_job_script("note_segment", job, **args)


async def read_ledger_location(state: StateClient, job: str, shard: str) -> str:
    """Where the shard's segments lie, as `note_place` has said; empty: it has had none."""
    key = f"{job_prefix(job)}:shard:{shard}"
    return str(await state.run_command("HGET", key, "place") or "")


async def record_ledger_location(
    state: StateClient, job: str, shard: str, token: int, location: str
) -> None:
    """Records where the shard's segments lie from now on."""
    await state.run_job_script("note_segment", job, shard=shard, token=token, place=location)


async def remove_segment(state: StateClient, job: str, shard: str, token: int, name: str) -> None:
    """Strikes a segment whose groups have all ended off the record."""
    await state.run_job_script(
        "note_segment", job, shard=shard, token=token, name=name, forget=True
    )


async def lease_groups(
    state: StateClient,
    job: str,
    trainer: str,
    token: int,
    step: int,
    known_groups: Iterable[int] = (),
) -> LeasedGroups:
    """The groups of step `step`, which turns version step - 1 into version step: steps count from
    1.

    Those that are ready are leased at once; the same ones come again, with more, for the same
    trainer and step, so that it needs no operation id. Stale groups are given back on the way: a
    token of an abandoned version counts as old as the version that its lineage ended at. Of
    `known_groups`, which the trainer has, none is among the answer's. Refused when `step` is not
    next.
    """
    args = {"trainer": trainer, "token": token, "step": step, "given": list(known_groups)}
    answer = await state.run_job_script("lease_groups", job, **args)
    waiting = LeaseWait(answer["waiting"], answer["on"]) if "waiting" in answer else None
    return LeasedGroups([decode_group_row(row) for row in answer["groups"] or []], waiting)


async def count_in_flight(state: StateClient, job: str) -> InFlightCounts:
    """The groups in flight, counted from their own rows, for `accounting` and for the live view."""
    return InFlightCounts(**await state.run_job_script("in_flight", job))


async def read_live_digests(state: StateClient, job: str) -> set[str]:
    """The digests of the bytes of groups that a step, or its replay, may still ask for."""
    return set((await state.run_job_script("digests", job))["digests"] or [])


def decode_group_row(row: dict[str, Any]) -> GroupRow:
    """A GroupRow from the hash in Redis."""
    known = {name: row[name] for name in _FIELD_TYPES if name in row}
    return GroupRow(**{name: _FIELD_TYPES[name](value) for name, value in known.items()})


async def _return_group(
    state: StateClient, job: str, name: str, token: int, group: int, op_id: str, *ends: str | bool
) -> None:
    """`ends`: the reason, the counter, the kind of the event, and whether the prompt returns."""
    args = {"job": job, "name": name, "token": token, "group": group, "op": op_id}
    args |= dict(zip(("reason", "counter", "kind", "requeue"), ends, strict=True))
    await state.run_script("group_returned", [job_prefix(job)], args)


def _decode_admitted(answer: dict[str, Any]) -> list[AdmittedGroup]:
    return [AdmittedGroup(**row) for row in answer["groups"] or []]
