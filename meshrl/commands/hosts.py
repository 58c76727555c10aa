"""`meshrl hosts` and `meshrl drain`: list hosts; empty one so that it may leave; use it again."""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from functools import partial
from pathlib import Path

from meshrl.common.base.errors import DeadlineExceeded, NotFound, Refused
from meshrl.common.state.pool.scheduling.snapshot import SHUTDOWN_NOTICE, PoolRequest
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.directory_paths import MeshPaths, find_mesh
from meshrl.directory.mesh_query import ANSWER_TIMEOUT_S, query_mesh
from meshrl.view.json_output import to_json_document
from meshrl.view.live import console_tables, mesh_tables
from meshrl.view.mesh.host_rows import HostRow, build_host_rows, read_hosts
from meshrl.view.mesh.mesh_snapshot import read_full_snapshot

POLL_S = 0.25
NO_TIMEOUT_S = 1e8  # the question ends itself


def drain_host(
    name: str, wait: bool, timeout_s: float | None, as_json: bool, mesh: Path | None
) -> None:
    """Request that everything moves off a host; with `wait` return when it has."""
    place, began = find_mesh(mesh), time.monotonic()

    async def request_drain(state: StateClient) -> HostRow:
        found = await _find_host(state, place, name)
        if found.drain_reason in ("", SHUTDOWN_NOTICE):  # a user's drain outlasts the host's return
            if not any(
                row.state == "up" and row.workers and row.host != found.host
                for row in await read_hosts(state, place)
            ):
                raise Refused(
                    f"{found.host} is the only host that runs workers",
                    fix="Join another host first, or run `meshrl down`",
                )
            await pool.submit_request(
                state, PoolRequest(uuid.uuid4().hex, "drain", host=found.host)
            )
        return found

    host = query_mesh(place, request_drain, ANSWER_TIMEOUT_S).host
    if wait:
        _wait_until_drained(place, host, began, timeout_s)
    took_s = round(time.monotonic() - began, 3)
    row = query_mesh(place, lambda state: _find_host(state, place, host), ANSWER_TIMEOUT_S)
    if as_json:
        document = {
            "host": host,
            "state": row.state,
            "instances": row.instances,
            "residents": row.instances,
        }
        print(
            json.dumps(document | {"services": row.services, "drain_s": took_s if wait else None})
        )
    elif wait:
        then = "is the head and stays" if row.head else "may leave without loss (`meshrl leave`)"
        print(f"{host} is drained after {took_s:.1f} s; it {then}")
    else:
        print(f"{host} is draining; `meshrl hosts` shows progress, `meshrl drain --off` ends it")


def end_drain(name: str, as_json: bool, mesh: Path | None) -> None:
    """Let the mesh use a host again."""
    place = find_mesh(mesh)

    async def clear_drain_reason(state: StateClient) -> tuple[str, bool]:
        found = await _find_host(state, place, name)
        return found.host, await pool.set_drain_reason(state, found.host, "")

    host, changed = query_mesh(place, clear_drain_reason, ANSWER_TIMEOUT_S)
    if as_json:
        print(json.dumps({"host": host, "changed": changed}))
    else:
        print(f"{host} accepts work again" if changed else f"{host} was not draining")


def _wait_until_drained(
    place: MeshPaths, host: str, started_s: float, timeout_s: float | None
) -> None:
    until = math.inf if timeout_s is None else started_s + timeout_s

    async def empty(state: StateClient) -> bool:
        while time.monotonic() < until:
            found = await _find_host(state, place, host)
            if not found.drain_reason:
                raise Refused(f"the drain of {host} was ended", fix="Run `meshrl drain` again")
            has_work = found.instances or found.services
            if found.state == "drained" or (found.state == "away" and not has_work):
                return True
            await asyncio.sleep(POLL_S)
        return False

    if not query_mesh(place, empty, NO_TIMEOUT_S):
        raise DeadlineExceeded(
            f"{host} is not empty after {timeout_s:g} s",
            fix="Run `meshrl hosts` to see its content",
        )


async def _find_host(state: StateClient, place: MeshPaths, name: str) -> HostRow:
    """Return the host of that name, or with that unique prefix."""
    found = await read_hosts(state, place)
    named = [row for row in found if row.host == name] or [
        row for row in found if row.host.startswith(name)
    ]
    if len(named) != 1:
        known = ", ".join(row.host for row in found)
        many = "several hosts match" if named else "no host matches"
        raise NotFound(f"{many} {name}", fix=f"Choose one of: {known}")
    return named[0]


def print_hosts(mesh: Path | None, as_json: bool) -> None:
    """Print the hosts of a mesh."""
    place = find_mesh(mesh)
    snapshot = query_mesh(place, partial(read_full_snapshot, known_jobs=()), ANSWER_TIMEOUT_S)
    found = build_host_rows(snapshot, place)
    if as_json:
        print(json.dumps(to_json_document(found)))
        return
    console_tables.print_table(mesh_tables.make_hosts_table(found))
    for lines in mesh_tables.list_scaler_lines(snapshot.scaler):
        print(*lines, sep="\n", end="\n" * bool(lines))
