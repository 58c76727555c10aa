"""Launch of hosts: directories, capacity and services, and the mesh file."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, NotFound, Refused, StateUnavailable
from meshrl.common.base.host.settings import MESH_TAG_ENV, MeshSettings, compute_mesh_tag
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state.pool.scheduling.host_services import (
    ALL_SERVICES,
    format_services,
    parse_services,
)
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.directory import directory_paths
from meshrl.directory.directory_paths import MeshPaths, read_json_or_empty, write_json
from meshrl.launch import leftover_processes
from meshrl.launch.foreground import EXIT_RETRY, choose_exit_status
from meshrl.launch.head.mesh_shape import POOL_FILE, read_pool_settings
from meshrl.launch.host_capacity import HostCapacity, parse_host_capacity
from meshrl.launch.hosts.host_launcher import HostLauncher, HostShape
from meshrl.launch.services.service_plan import make_agent
from meshrl.launch.services.service_supervisor import HostServices
from meshrl.launch.shutdown import STOP_TIMEOUT_S
from meshrl.launch.up_down import MeshFile, read_mesh_file
from meshrl.services.node.__main__ import build_parser
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.contract.state.state_bench import binary_of, running_server
from tests.load import scaled

LONG_S = 600.0
WITHIN_S = 60.0


class FastClock(SystemClock):
    """Clock whose sleeps return at once and advance it by `times` their length."""

    def __init__(self, times: float = 1.0) -> None:
        self.passed_s, self._times = 0.0, times

    def monotonic(self) -> float:
        return super().monotonic() + self.passed_s

    async def sleep(self, seconds: float) -> None:
        self.passed_s += self._times * seconds
        await asyncio.sleep(0)


def make_host_launcher(
    root: Path, url: str = "redis://127.0.0.1:1/0", drain_s: float = 0.0
) -> HostLauncher:
    place = MeshPaths(root)
    place.directory.mkdir(mode=0o700)
    settings = MeshSettings(
        redis_url=url, run_root=str(root), host="gpu1-aa", secret="5e" * 32, joinable=True
    )
    settings.to_file(place.settings)
    HostShape().write(place)
    return HostLauncher(place, drain_s)


async def test_redis_that_lost_the_host_does_not_expel_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosting = make_host_launcher(tmp_path)
    hosting.clock = clock = FastClock()
    hosting.state = open_simulated_state(SystemClock())
    watching = asyncio.create_task(hosting._watch_membership())
    async with asyncio.timeout(scaled(WITHIN_S)):
        while clock.passed_s < LONG_S and not watching.done():
            await asyncio.sleep(0)
    assert not watching.done() and not hosting.failed.is_set() and not hosting.is_expelled
    assert capsys.readouterr().out.count("Redis rejects gpu1-aa") == 1
    watching.cancel()


@pytest.mark.needs("redis-server")
async def test_start_rejected_by_redis_exits_as_retry(tmp_path: Path) -> None:
    with running_server(binary_of("redis-server")) as server:
        hosting = make_host_launcher(tmp_path, server.url)
        hosting.clock = FastClock(times=20.0)
        async with asyncio.timeout(scaled(WITHIN_S)):
            with pytest.raises(
                StateUnavailable, match="the head of the mesh is unreachable"
            ) as caught:
                await hosting._connect_to_redis()
    assert choose_exit_status(caught.value) == EXIT_RETRY


def test_launcher_records_its_stop_timeout_and_leave_marker(tmp_path: Path) -> None:
    hosting = make_host_launcher(tmp_path, drain_s=300.0)
    hosting.mesh_paths.leave_marker.touch()
    hosting._directory_lock.acquire()
    try:
        assert not hosting.leaves_on_stop, "that was asked of the one before"
        assert read_json_or_empty(hosting.mesh_paths.root_marker)["end_s"] == 300.0 + STOP_TIMEOUT_S
        hosting.mesh_paths.leave_marker.touch()
        assert hosting.leaves_on_stop
    finally:
        hosting._directory_lock.release()


@pytest.fixture
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MESHRL_HOME", raising=False)
    return tmp_path


def make_run(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "job.json").write_text("{}")


def test_runs_of_one_name_are_numbered(working_directory: Path) -> None:
    config = JobConfig(name="sum")
    assert directory_paths.choose_run_directory(config, False) == working_directory / "runs/sum"
    make_run(working_directory / "runs/sum")
    assert directory_paths.choose_run_directory(config, False) == working_directory / "runs/sum-2"
    make_run(working_directory / "runs/sum-2")
    assert directory_paths.choose_run_directory(config, False) == working_directory / "runs/sum-3"


def test_existing_run_in_the_chosen_directory_is_rejected(working_directory: Path) -> None:
    make_run(working_directory / "mine")
    with pytest.raises(Refused, match="meshrl resume mine"):
        directory_paths.choose_run_directory(JobConfig(out="mine"), False)


def test_last_started_mesh_is_the_default(working_directory: Path) -> None:
    with pytest.raises(NotFound, match="meshrl up"):
        directory_paths.find_mesh(None)
    first, second = MeshPaths(working_directory / "a"), MeshPaths(working_directory / "b")
    for place in (first, second):
        directory_paths.write_json(place.settings, {"redis_url": "redis://nowhere"})
        directory_paths.set_current_mesh(place)
    assert directory_paths.find_mesh(None).root == working_directory / "b"
    for named in (
        working_directory / "a",
        working_directory / "a/mesh",
        working_directory / "a/mesh/settings.json",
    ):
        assert directory_paths.find_mesh(named).root == working_directory / "a"


@pytest.fixture
def leftover_process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with the settings file of the mesh, in its own session."""
    program = "import time; print(flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, MESH_TAG_ENV: compute_mesh_tag(tmp_path / "settings.json")},
        start_new_session=True,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child
        child.kill()


async def test_leftover_processes_of_a_mesh_are_found_and_killed(
    tmp_path: Path, leftover_process: subprocess.Popen[bytes]
) -> None:
    settings = tmp_path / "settings.json"
    assert leftover_processes.find_leftovers(tmp_path / "other.json") == []
    assert await leftover_processes.kill_leftovers(settings, 10.0) == [leftover_process.pid]
    assert leftover_processes.find_leftovers(settings) == []


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mesh.toml"


def test_missing_settings_have_defaults(file: Path) -> None:
    file.write_text("[pool]\nkeep_days = 2.5\nturns = false\n")
    assert read_mesh_file(file) == MeshFile(PoolSettings(keep_days=2.5, time_slicing=False))


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (
            "[pool]\nkeep_day = 3.0",
            "line 2: unknown key pool.keep_day. Did you mean pool.keep_days?",
        ),
        ("[poll]\nturns = true", "line 1: unknown key poll. Did you mean pool?"),
        ("[pool]\nturns = 1", "line 2: pool.time_slicing must be true or false, not 1"),
        ("[pool]\nmove_s = 0", "line 2: pool.move_timeout_s = 0 must be above 0"),
        ("[pool]\nspot_price = nan", "line 2: pool.spot_price must be a finite number, not nan"),
        ("[pool]\nlent_price = inf", "line 2: pool.lent_price must be a finite number, not inf"),
        ("[pool]\nspot_price = -1.0", "line 2: pool.spot_price = -1.0 must be at least 0"),
        ("[zebra]\nx = 1", "unknown key zebra.x. docs/operate/mesh.md lists"),
        ("[pool]\nturns = yes", "line 2, column 9: Invalid value: turns = yes. Put text in quotes"),
    ],
)
def test_mistakes_in_the_mesh_file_name_their_line(file: Path, written: str, says: str) -> None:
    file.write_text(written)
    with pytest.raises(ConfigError) as caught:
        read_mesh_file(file)
    assert says in str(caught.value)


def test_missing_mesh_file_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the mesh file .*: No such"):
        read_mesh_file(file)


def test_restarted_mesh_keeps_its_pool_settings(tmp_path: Path) -> None:
    place, told = MeshPaths(tmp_path), PoolSettings(keep_days=2.5)
    assert read_pool_settings(place) == PoolSettings()
    place.directory.mkdir()
    write_json(place.directory / POOL_FILE, asdict(told))
    assert read_pool_settings(place) == told
    (place.directory / POOL_FILE).write_text('{"keep_days": 2')
    with pytest.raises(ConfigError, match="is corrupt"):
        read_pool_settings(place)


async def test_failed_task_is_the_failure_reason_of_a_host(tmp_path: Path) -> None:
    services = HostServices(SystemHost(), SystemClock(), MeshPaths(tmp_path))
    endless = asyncio.create_task(asyncio.Event().wait())
    services.watch_task(endless, "wait")
    endless.cancel()
    await asyncio.wait([endless])
    assert not services.failed.is_set(), "it was asked to end"

    async def fail() -> None:
        raise OSError("the disk is gone")

    services.watch_task(asyncio.create_task(fail()), "admit hosts")
    async with asyncio.timeout(scaled(20.0)):
        await services.failed.wait()
    assert services.failure_reason == "the task to admit hosts failed: OSError: the disk is gone"


def test_host_offers_workers_and_all_services_by_default() -> None:
    assert parse_host_capacity(0, "cpu", False, None, 3) == HostCapacity(
        3, "cpu", ("shards", "sandboxes")
    )
    assert parse_host_capacity(0, "cuda", False, "shards", 3) == HostCapacity(
        0, "cuda", ("shards",)
    )
    assert parse_host_capacity(0, "cpu", True, "sandboxes,shards", 3) == HostCapacity(
        0, "cpu", ("shards", "sandboxes")
    )
    assert parse_host_capacity(1, "cpu", False, "none") == HostCapacity(1, "cpu", ())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((0, "cpu", True, "none", 3), "neither workers nor services"),
        ((0, "cpu", False, "none", 0), "neither workers nor services"),
        ((0, "cuda", True, None, 3), "--no-workers and --device cuda"),
        ((4, "cpu", True, None, 3), "--no-workers and --workers 4"),
        ((1, "cpu", False, "shards,engines", 3), "'engines' is not a service"),
        ((1, "cpu", False, "", 3), "'' is not a service"),
    ],
)
def test_contradicting_options_are_rejected(
    given: tuple[int, str, bool, str | None, int], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_host_capacity(*given)


@pytest.mark.parametrize("takes", [(), ("shards",), ALL_SERVICES])
def test_agent_receives_the_accepted_services(takes: tuple[str, ...]) -> None:
    told = make_agent("here", 0, "cpu", takes).argv[3:]
    assert (
        build_parser().parse_args(told).services == takes == parse_services(format_services(takes))
    )
