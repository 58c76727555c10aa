"""Checks of a shared gang while it runs and at its end; see also `SharedGang` and `Role.check`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from meshrl.common.base.files.offload_media import make_segment_key
from meshrl.common.base.host.settings import make_offload_path
from meshrl.common.state import events, groups, jobs
from meshrl.common.state.job_lifecycle.trajectory_accounting import (
    compute_account,
    format_violations,
)
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.common.state.redis.client import StateClient
from meshrl.services.node.worker import GangWorker
from tests.mesh.simulated.sharing.roles import Role
from tests.mesh.simulated.sharing.world import JOBS, SharedGang

WATCH_S = 0.5  # between two checks of copies
COMPARE_S = 0.1
PERSISTS_S = 8.0  # a difference that lasts longer is no message on its way
PROGRESS_LIMIT_S = 240.0  # after the last fault
DECISION_LIMIT_S = 30.0
STEPS_AFTER = 1


async def watch_copies(world: SharedGang) -> None:
    """Check until cancelled that what is not on the accelerator has a copy."""
    while True:
        await world.clock.sleep(WATCH_S)
        workers = world.workers
        for role in world.live_roles:
            if role.worker in workers:
                _check_copies(world, role, workers[role.worker])


def _check_copies(world: SharedGang, role: Role, worker: GangWorker) -> None:
    for name, kind in role.kinds._kinds.items():
        if kind.memory is None or kind.tensors.rebuild is not None:
            continue
        copies = [tier for tier in kind.equal_tiers if _has_copy(role, name, tier, worker)]
        if not copies:
            world.violate(f"{role.process.label}: the only copy of its {name} is lost")


def _has_copy(role: Role, kind: str, tier: Tier, worker: GangWorker) -> bool:
    if tier == Tier.MEMORY:
        return bool(worker.segments.find(make_segment_key(role.mesh.name, kind)).path)
    directory = role.kinds._kinds[kind].storage.directory
    return Path(make_offload_path(directory, role.mesh.name, kind)).exists()


async def wait_for_steps(world: SharedGang) -> float:
    """Wait until each job has made further steps; return the seconds. Record a violation if one
    makes none in time.
    """
    began = world.clock.monotonic()
    base = {job: (await jobs.read_job(world.state, job)).version for job in JOBS}
    while True:
        rows = [await jobs.read_job(world.state, job) for job in JOBS]
        passed_s = world.clock.monotonic() - began
        if all(row.version >= base[row.id] + STEPS_AFTER for row in rows):
            return passed_s
        ended = [f"{row.id} is {row.phase}: {row.error}" for row in rows if row.phase != "training"]
        late = [row.id for row in rows if row.version < base[row.id] + STEPS_AFTER]
        if passed_s > PROGRESS_LIMIT_S:
            world.violate(f"{late} made too few steps in {passed_s:.0f} s {ended}")
            return passed_s
        await world.clock.sleep(1.0)


async def check_residency(world: SharedGang) -> None:
    """Check that workers know what their processes hold; a message may be on its way."""
    first_seen: dict[str, float] = {}
    until = world.clock.monotonic() + 2 * PERSISTS_S
    while world.clock.monotonic() < until:
        found = {
            text for worker in world.workers.values() for text in _compare_kinds(world, worker)
        }
        now = world.clock.monotonic()
        first_seen = {text: first_seen.get(text, now) for text in sorted(found)}
        lasting = [text for text, since in first_seen.items() if now - since > PERSISTS_S]
        if lasting:
            for text in lasting:
                world.violate(text)
            return
        if not found:
            return
        await world.clock.sleep(COMPARE_S)


def _compare_kinds(world: SharedGang, worker: GangWorker) -> list[str]:
    found = []
    for role in world.live_roles:
        if role.worker != worker._mesh.name:
            continue
        states = {state.kind: state for state in role.kinds.describe_kinds().kinds}
        held = sum(state.accelerator_bytes for state in states.values())
        if not role.phase and held != world.get_used_bytes(role):
            found.append(f"{role.process.label} reports {held} bytes of the accelerator")
        for kind, state in states.items():
            size = worker.segments.find(make_segment_key(role.mesh.name, kind)).size_bytes
            if not role.phase and size != state.memory_bytes:
                found.append(f"{role.process.label}: {size} bytes of {kind} in memory, not {state}")
        entry = worker.residency._table.find(role.placement.instance)
        if entry is None or entry.is_stale or role.phase:
            continue
        for kind, place in entry.places.items():
            state = states[kind]
            known = place.accelerator_bytes, place.memory_bytes, place.disk_bytes
            actual = state.accelerator_bytes, state.memory_bytes, state.disk_bytes
            if known != actual:
                found.append(f"{worker._mesh.name} believes {place}, and the process has {state}")
    return found


async def check_decisions(world: SharedGang) -> None:
    """Check that a planner answers a request."""
    request = await world.place("")
    until = world.clock.monotonic() + DECISION_LIMIT_S
    while world.clock.monotonic() < until:
        recorded = await events.read_all(world.state)
        kinds = {event.kind for event in recorded if event.fields.get("op") == request}
        if kinds & {"place_settled", "place_declined"}:
            return
        await world.clock.sleep(1.0)
    world.violate(f"no planner has answered {request} in {DECISION_LIMIT_S:g} s")


async def check_accounts(world: SharedGang) -> None:
    """Check the account of each job, and that its steps follow each other."""
    for error in await list_account_errors(world.state, JOBS):
        world.violate(error)


async def list_account_errors(state: StateClient, names: Iterable[str]) -> list[str]:
    """List what is wrong in the accounts of jobs; call it while no process runs."""
    found, recorded = [], await events.read_all(state)
    for job in names:
        own = [event for event in recorded if event.fields.get("job") == job]
        in_flight = (await groups.count_in_flight(state, job)).samples
        if bad := format_violations(compute_account(own, in_flight, job)):
            found.append(f"{job}: {bad}")
        steps = [event.fields["step"] for event in own if event.kind == "step"]
        version = (await jobs.read_job(state, job)).version
        if steps != list(range(1, version + 1)):
            found.append(f"{job}: version {version} consists of the steps {steps}")
    return found


def list_leftovers(world: SharedGang) -> list[str]:
    """List what a stopped mesh should not have."""
    machine = world.machine
    found = [f"{process.label} is still running" for process in machine.live_processes]
    found += [f"{path} is still open" for path in machine.list_unclosed_files()]
    dead = {*machine.dead_tasks, asyncio.current_task()}
    return found + [
        f"task {task.get_name()} is still running"
        for task in asyncio.all_tasks()
        if task not in dead
    ]
