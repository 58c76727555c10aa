"""Second host of a mesh: it joins, computes, drains, is lost, returns and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.common.state import events, jobs, registry
from meshrl.common.state.events import Event
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.launch import leftover_processes
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.mesh_shape import MeshShape
from tests.load import scaled
from tests.mesh.hosts.joined_host import JoinedHost, create_neighbor_host, submit, until

T = TypeVar("T")
SILENT_S = 300.0  # limit of the whole test
pytestmark = pytest.mark.timeout(SILENT_S)
HEAD = (MeshShape(workers=1),)


@asynccontextmanager
async def collect_events(mesh: Launcher) -> AsyncIterator[list[Event]]:
    """Collect the events of the mesh from now on: its stream retains none for long without a
    reader.
    """
    heard: list[Event] = []

    async def listen() -> None:
        since = await events.read_last_id(mesh.state)
        while True:
            for event in await events.read_all(mesh.state, since):
                heard.append(event)
                since = event.id
            await asyncio.sleep(0.2)

    task = asyncio.create_task(listen())
    yield heard
    assert not task.done(), task.exception()
    task.cancel()


async def run_json_command(mesh: Launcher, *words: str) -> Any:
    """Return the JSON output of a command."""
    line = [*words, "--json", "--mesh", str(mesh.mesh_paths.root)]
    found = await asyncio.to_thread(CliRunner().invoke, app, line)
    assert found.exit_code == 0, (line, found.output, found.exception)
    return json.loads(found.output)


@pytest.mark.deep
async def test_second_host_computes_drains_and_leaves(mesh: Launcher, tmp_path: Path) -> None:
    host = create_neighbor_host(mesh, tmp_path / "second")
    host.start()
    try:
        async with collect_events(mesh) as heard:
            await assert_computes(mesh, host, heard)
            await assert_drains(mesh, host, heard)
            await lose_and_restore(mesh, host, heard)
        assert host.end() == 0, host.output
    finally:
        if host.program is not None and host.program.poll() is None:
            host.program.kill()
            host.program.wait()
    assert not leftover_processes.find_leftovers(host.place.settings.resolve())
    alive = {e.name for e in await registry.list_entries(mesh.state) if e.alive}
    assert not alive & {f"node/{host.name}", "worker/h1w0"}
    assert {f"node/{mesh.settings.host}", "worker/w0"} <= alive


def select_events(heard: list[Event], kind: str) -> list[dict[str, Any]]:
    return [event.fields for event in heard if event.kind == kind]


async def wait_for_event(heard: list[Event], kind: str) -> list[dict[str, Any]]:
    return select_events(heard, kind)


async def assert_computes(mesh: Launcher, host: JoinedHost, heard: list[Event]) -> None:
    async def worker() -> bool:
        assert host.program is not None and host.program.poll() is None, host.output
        return any(w.host == host.name and w.alive for w in await pool.read_workers(mesh.state))

    await until("a worker of the second host", worker)
    await submit(mesh, "digits", "budget.steps=100000", "rollout.weights=collective")

    async def has_computed_there() -> set[str]:
        found = await registry.list_entries(mesh.state)
        return {e.kind for e in found if e.host == host.name} & {"engine", "trainer"}

    assert await until("a role process there", has_computed_there)

    async def two_steps() -> bool:
        row = await jobs.read_job(mesh.state, "digits")
        assert not row.is_terminal, f"{row.error}\n{host.output}"
        return row.steps_done >= 2

    await until("two steps", two_steps)

    async def broadcast() -> bool:
        engines = await registry.list_entries(mesh.state, "engine")
        ways = [e.stats.get("weights_way") for e in engines if e.host == host.name]
        return any(
            way["way"] == "collective" and way["verdict"].startswith("it took") and way["bytes"] > 0
            for way in ways
            if way
        )

    assert await until("a version that came by broadcast", broadcast)
    [joined] = select_events(heard, "host_joined")
    assert joined["host"] == host.name


async def assert_drains(mesh: Launcher, host: JoinedHost, heard: list[Event]) -> None:
    head, second = await run_json_command(mesh, "hosts")
    assert (head["head"], head["state"], head["workers"]) == (True, "up", ["w0"])
    assert (second["host"], second["state"]) == (host.name, "up")
    assert second["workers"] == ["h1w0"] and second["residents"] and second["trip_ms"] > 0
    assert head["services"] + second["services"]
    drained = await run_json_command(
        mesh, "drain", "second", "--wait", "--timeout", str(scaled(90))
    )
    assert (drained["state"], drained["residents"], drained["services"]) == ("drained", [], [])
    assert drained["drain_s"] > 0
    await until("word of it", lambda: wait_for_event(heard, "drain_settled"))
    assert (await run_json_command(mesh, "drain", "second", "--off"))["changed"]
    assert [row["state"] for row in await run_json_command(mesh, "hosts")] == ["up", "up"]


async def with_timeout(reading: Awaitable[T]) -> T:
    return await asyncio.wait_for(reading, scaled(60.0))


async def lose_and_restore(mesh: Launcher, host: JoinedHost, heard: list[Event]) -> None:
    note = host.place.log_path("note")
    note.write_text("before\n")
    async with follow_logs(mesh, "note") as follows:
        await assert_logs_followed(mesh, host, heard, follows)


@asynccontextmanager
async def follow_logs(mesh: Launcher, name: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start `meshrl logs -f` with a wait for hosts that lasts as long as these tests.

    The process handles Ctrl-C also where tests run in the background of a shell.
    """
    line = ["logs", "-f", name, "--mesh", str(mesh.mesh_paths.root)]
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    imported = "from meshrl import __main__; from meshrl.commands import logs"
    patient = f"{heard}; {imported}; logs.SILENT_S = {scaled(SILENT_S)}; __main__.main()"
    follows = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", patient, *line), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield follows
    finally:
        if follows.returncode is None:
            follows.kill()
            await follows.wait()


async def assert_logs_followed(
    mesh: Launcher, host: JoinedHost, heard: list[Event], follows: asyncio.subprocess.Process
) -> None:
    assert host.program is not None
    note = host.place.log_path("note")
    assert follows.stdout is not None and follows.stderr is not None
    assert await with_timeout(follows.stdout.readline()) == b"before\n"
    for pid in [
        host.program.pid,
        *leftover_processes.find_leftovers(host.place.settings.resolve()),
    ]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    host.program.wait()
    [lost] = await until("the loss of the host", lambda: wait_for_event(heard, "host_lost"))
    assert (lost["host"], lost["workers"]) == (host.name, ["h1w0"])
    assert [row["state"] for row in await run_json_command(mesh, "hosts")] == ["up", "away"]
    silent = (await with_timeout(follows.stderr.readline())).decode()
    assert f"{host.name} cannot send note now" in silent and "waiting" in silent
    host.start()
    await until("its return", lambda: wait_for_event(heard, "host_back"))

    async def alive() -> bool:
        return any(w.host == host.name and w.alive for w in await pool.read_workers(mesh.state))

    await until("its worker", alive)
    row = await jobs.read_job(mesh.state, "digits")
    assert not row.is_terminal, "what was on it is all that was lost"
    with note.open("a") as file:
        file.write("after\n")
    assert await with_timeout(follows.stdout.readline()) == b"after\n", "it goes on where it was"
    follows.send_signal(signal.SIGINT)
    assert await with_timeout(follows.wait()) == 130
