"""Fork server of a mesh: its preloaded modules, restarts and fallback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.mesh.process.child_handle import ChildProcess, read_start_time
from meshrl.common.mesh.process.forking.fork_client import FORK_SERVER_ENV, is_answering
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.supervision.supervisor import ChildExit
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.services import service_plan
from meshrl.launch.services.mesh_fork_server import MeshForkServer
from tests.load import scaled

ROOT = Path(__file__).parents[4]

SHOWS = """
    import asyncio, json, sys
    import torch, zmq
    print(json.dumps({
        "imported": sorted(sys.modules),
        "zmq": zmq.Context._instance is not None,
        "loop": asyncio.get_event_loop_policy()._local._loop is not None,
        "group": torch.distributed.is_initialized(),
        "cuda": torch.cuda.is_initialized(),
    }))
"""


def make_fork_server(directory: Path, budget: tuple[int, float] = (5, 60.0)) -> MeshForkServer:
    return MeshForkServer(SystemHost(), SystemClock(), MeshPaths(directory), {}, budget)


async def until(holds: Callable[[], object], within_s: float = 60.0) -> None:
    async with asyncio.timeout(scaled(within_s)):
        while not holds():
            await asyncio.sleep(0.01)


def test_preloaded_modules_are_documented() -> None:
    text = (ROOT / "docs/develop/architecture.md").read_text()
    assert "\n```\n" + "\n".join(service_plan.PRELOADED_MODULES) + "\n```\n" in text


def list_descriptors(pid: int) -> list[str]:
    """List the open descriptors of a process as paths or kinds."""
    found = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            found.append(os.readlink(f"/proc/{pid}/fd/{descriptor}").partition(":")[0])
    return sorted(found)


@pytest.mark.rotating(4)
async def test_fork_server_preloads_modules_and_starts_no_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FORK_SERVER_ENV, raising=False)
    mine = make_fork_server(tmp_path)
    await mine.start()
    try:
        await mine.wait_until_listening()
        pid = mine.supervisor.children["fork-server"].pid
        assert len(os.listdir(f"/proc/{pid}/task")) == 1
        log = str(tmp_path / "mesh/logs/fork-server.log")
        # Death signal of its owner, wakeup pipe (both ends), socket, selector: when it serves,
        # a moment after it is found.
        wanted = sorted(["anon_inode", "pipe", "pipe", "pipe", "socket", "/dev/null", log, log])
        async with asyncio.timeout(scaled(20.0)):
            while (found := list_descriptors(pid)) != wanted:
                assert "/dev/nvidia" not in str(found)
                await asyncio.sleep(0.01)

        (tmp_path / "shows.py").write_text("\n".join(row[4:] for row in SHOWS.split("\n")))
        seen = tmp_path / "seen"
        child = SystemHost().spawn(
            [sys.executable, "-m", "shows"],
            name="shows",
            env={**mine.environment, "PYTHONPATH": str(tmp_path)},
            log=seen,
        )
        assert await child.wait(scaled(30)) == 0, seen.read_text()
        document = json.loads(seen.read_text())
        assert set(service_plan.PRELOADED_MODULES) <= set(document.pop("imported"))
        assert set(document.values()) == {False}, document
    finally:
        await mine.stop(5.0)


async def test_fork_server_is_restarted_and_its_processes_survive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FORK_SERVER_ENV, raising=False)
    monkeypatch.setattr(service_plan, "PRELOADED_MODULES", ())
    mine = make_fork_server(tmp_path)
    await mine.start()
    await mine.wait_until_listening()
    first = mine.supervisor.children["fork-server"].pid
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)")
    env = {**mine.environment, "PYTHONPATH": str(tmp_path)}

    async def fork_child(server_pid: int) -> int:
        """Fork a process without a fallback to a normal start."""
        async with asyncio.timeout(scaled(20.0)):
            while True:
                host = SystemHost()  # a host without a record of a silent fork server
                child = host.spawn([sys.executable, "-m", "sleeps"], name="sleeps", env=env)
                if psutil.Process(child.pid).ppid() == server_pid:
                    return child.pid
                os.kill(child.pid, signal.SIGKILL)
                await asyncio.sleep(0.02)

    pid = await fork_child(first)
    os.kill(first, signal.SIGKILL)
    await until(lambda: not read_start_time(first))
    assert read_start_time(pid)
    await until(lambda: mine.supervisor.children.get("fork-server") is not None)
    os.kill(await fork_child(mine.supervisor.children["fork-server"].pid), signal.SIGKILL)
    await mine.stop(5.0)
    assert read_start_time(pid)
    os.kill(pid, signal.SIGKILL)


async def test_stopped_fork_server_is_replaced_and_its_exit_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FORK_SERVER_ENV, raising=False)
    monkeypatch.setattr(service_plan, "PRELOADED_MODULES", ())
    told: list[str] = []

    async def record_exit(child: ChildProcess, end: ChildExit) -> None:
        told.append(child.name)

    mine = MeshForkServer(
        SystemHost(), SystemClock(), MeshPaths(tmp_path), {}, (5, 60.0), record_exit
    )
    await mine.start()
    await mine.wait_until_listening()
    first = mine.supervisor.children["fork-server"].pid
    assert is_answering(MeshPaths(tmp_path).fork_server_socket)
    os.kill(first, signal.SIGSTOP)
    await until(lambda: not read_start_time(first))
    await until(lambda: is_answering(MeshPaths(tmp_path).fork_server_socket))
    assert told == ["fork-server"]
    await mine.stop(5.0)


async def test_fork_server_that_does_not_start_is_replaced_by_normal_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(FORK_SERVER_ENV, raising=False)
    monkeypatch.setattr(service_plan, "PRELOADED_MODULES", ("no.such.module",))
    mine = make_fork_server(tmp_path, budget=(1, 60.0))
    await mine.start()
    await mine.wait_until_listening()
    output = capsys.readouterr().err
    assert "no fork server" in output and "fork-server.log" in output
    assert "ModuleNotFoundError" in (tmp_path / "mesh/logs/fork-server.log").read_text()
    await mine.stop(5.0)


@pytest.mark.parametrize(("given", "says"), [("off", ""), ("/another/one", "/another/one")])
async def test_fork_server_setting_of_the_user_is_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: str,
    says: str,
) -> None:
    monkeypatch.setenv(FORK_SERVER_ENV, given)
    mine = make_fork_server(tmp_path)
    await mine.start()
    assert mine.environment == {FORK_SERVER_ENV: given} and not mine.supervisor.children
    output = capsys.readouterr().err
    assert says in output and bool(output) == bool(says)
    await mine.wait_until_listening()
    await mine.stop(1.0)
