"""Monitoring of a mesh: health pages, gauges, and the merged metrics of its processes."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.supervision.exit_reports import LastExit
from meshrl.common.state import steps
from meshrl.common.state.jobs import JobRow, Phase
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.rows import Gang, Instance, Role, WorkerRow
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.registry import RegistryEntry, register
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.monitoring.health_endpoint import MergedExposition, scrape_pages, serve_health
from meshrl.launch.monitoring.host_health import MAX_AGE_S, HostHealth, MonitoredProcess
from meshrl.launch.root_process import RootProcess
from meshrl.sim.redis.client import SimulatedRedisClient
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot
from meshrl.view.mesh.stalls import Stall
from meshrl.view.metrics.mesh_gauges import HeadReader, HeadSnapshot, make_metric_families
from tests.contract.state.state_bench import JOB as BENCH_JOB
from tests.contract.state.state_bench import TRAINER, Bench
from tests.load import scaled

WITHIN_S = 30.0  # on a busy host; each condition is normally met within two seconds


@dataclass
class Root(RootProcess):
    """Root process whose state a test sets."""

    mesh_paths: MeshPaths
    settings: MeshSettings
    clock: SystemClock = field(default_factory=SystemClock)
    host: SystemHost = field(default_factory=SystemHost)
    connection: tuple[StateClient, MeshSettings] | None = None
    is_ready: bool = False
    unready_reason: str = ""
    planned_services: tuple[str, ...] = ("node/here",)
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    failure_reason: str = ""

    def connect(self) -> SimulatedRedisClient:
        state = open_simulated_state(self.clock)
        self.connection = (state, self.settings)
        assert isinstance(state.client, SimulatedRedisClient)
        return state.client

    async def register(self, name: str) -> None:
        assert self.connection is not None
        entry = RegistryEntry(name, name.split("/")[0], host="here", incarnation=name)
        await register(self.connection[0], entry, 600_000)


@dataclass
class HealthClient:
    root: Root
    stop: asyncio.Event
    url: str

    async def get(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(answer, self.url + path)

    async def until(self, path: str, words: str) -> str:
        end = time.monotonic() + scaled(WITHIN_S)
        while words not in (said := (await self.get(path))[1]):
            assert time.monotonic() < end, said
            await asyncio.sleep(0.02)
        return said

    async def make_healthy(self) -> SimulatedRedisClient:
        redis = self.root.connect()
        await self.root.register("node/here")
        self.root.is_ready = True
        await self.until("/readyz", "ok\n")
        return redis


def answer(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=scaled(WITHIN_S)) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@asynccontextmanager
async def serve_root(
    tmp_path: Path, head: bool = False, stall_s: float = 30.0
) -> AsyncIterator[HealthClient]:
    settings = MeshSettings(redis_url="", run_root=str(tmp_path), host="here")
    place = MeshPaths(tmp_path)
    place.directory.mkdir()
    settings.to_file(place.settings)
    root, stop = Root(place, settings), asyncio.Event()
    async with serve_health(
        root, stop, "127.0.0.1:*", head, stall_s=stall_s, poll_s=0.1
    ) as address:
        yield HealthClient(root, stop, address)


async def test_readiness_page_gives_the_reason(tmp_path: Path) -> None:
    async with serve_root(tmp_path) as host:
        assert await host.get("/readyz") == (503, "the host is starting\n")
        assert await host.get("/livez") == (200, "ok\n")
        host.root.is_ready = True
        await host.until("/readyz", "Redis has not been polled yet")
        redis = host.root.connect()
        await host.until("/readyz", "node/here does not renew its lease")
        await host.root.register("node/here")
        await host.until("/readyz", "ok\n")
        host.root.unready_reason = "weights is down"
        await host.until("/readyz", "weights is down")
        host.root.unready_reason = ""
        redis.server.faults.is_unreachable = True
        await host.until("/readyz", "Redis does not answer")
        assert "meshrl_redis_up 0.0" in (await host.get("/metrics"))[1]
        redis.server.faults.is_unreachable = False
        await host.until("/readyz", "ok\n")
        assert host.root.connection is not None
        await pool.set_drain_reason(host.root.connection[0], "here", "asked by hand")
        await host.until("/readyz", "the host is draining: asked by hand")
        host.stop.set()
        assert await host.get("/readyz") == (503, "the host is stopping\n")
        assert (await host.get("/livez"))[0] == 200


async def test_liveness_fails_when_the_event_loop_is_blocked(tmp_path: Path) -> None:
    async with serve_root(tmp_path, stall_s=0.6) as host:
        await host.until("/livez", "ok\n")
        with ThreadPoolExecutor(1) as others:
            asking = others.submit(get_failure, host.url + "/livez")
            while not asking.done():  # which blocks the loop
                time.sleep(0.05)  # noqa: ASYNC251
        assert "the event loop has not run for" in asking.result()
        await host.until("/livez", "ok\n")


def get_failure(url: str) -> str:
    end = time.monotonic() + scaled(WITHIN_S)
    while (found := answer(url))[0] != 503:
        assert time.monotonic() < end
    return found[1]


async def test_missing_processes_are_down_and_others_up(tmp_path: Path) -> None:
    async with serve_root(tmp_path) as host:
        await host.make_healthy()
        host.root.planned_services = ("node/here", "planner/2")
        await host.until("/metrics", 'meshrl_up{job="",kind="planner",service="planner/2"} 0.0')
        page = await host.until("/metrics", "meshrl_redis_up 1.0")
        assert 'meshrl_up{job="",kind="node",service="node/here"} 1.0' in page
        assert 'meshrl_up{job="",kind="root",service="hosting"} 1.0' in page
        assert f'meshrl_disk_free_bytes{{path="{tmp_path}"}}' in page
        assert "meshrl_hosts" not in page


async def test_head_shows_the_mesh_unless_redis_is_unreachable(
    tmp_path: Path,
) -> None:
    async with serve_root(tmp_path, head=True) as host:
        redis = await host.make_healthy()
        await host.until("/metrics", 'meshrl_hosts{state="up"} 1.0')
        redis.server.faults.is_unreachable = True
        await host.until("/readyz", "Redis does not answer")
        await host.until("/metrics", "meshrl_redis_up 0.0")
        assert "meshrl_hosts" not in (await host.get("/metrics"))[1]


class AdjustableClock(SystemClock):
    """Clock that a test can advance."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


async def test_unreadable_row_is_reported_once_and_read_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    clock, bad = AdjustableClock(), False

    async def of_mesh(state: StateClient) -> HeadSnapshot:
        if bad:
            raise KeyError("phase")
        return HeadSnapshot(MeshSnapshot())

    settings = MeshSettings(redis_url="", run_root=str(tmp_path), host="here")
    root = Root(MeshPaths(tmp_path), settings, clock, is_ready=True)
    root.connect()
    await root.register("node/here")
    standing = HostHealth(root, asyncio.Event(), of_mesh, 1000.0, 0.01)
    ticking, looking = (
        asyncio.create_task(standing.watch_root_process()),
        asyncio.create_task(standing.poll_forever()),
    )

    async def until(words: str) -> None:
        async with asyncio.timeout(scaled(WITHIN_S)):
            while not (said := standing.explain_not_ready()).startswith(words) or bool(
                said
            ) != bool(words):
                await asyncio.sleep(0.01)

    await until("")
    bad = True
    await until("the data in Redis is unreadable: KeyError('phase')")
    assert capfd.readouterr().err.count("KeyError: 'phase'") == 1
    bad = False
    await until("")
    looking.cancel()  # whatever its outcome
    clock.ahead_s = MAX_AGE_S + 1.0
    assert standing.explain_not_ready().startswith("Redis has not been polled for 3")
    ticking.cancel()
    await asyncio.gather(ticking, looking, return_exceptions=True)


async def test_taken_port_error_names_the_option(tmp_path: Path) -> None:
    async with serve_root(tmp_path) as host:
        where = host.url.removeprefix("http://")
        with pytest.raises(ConfigError, match="no port") as caught:
            async with serve_health(host.root, host.stop, where, is_head=False):
                pass
        assert "--health" in caught.value.where


FIRST = """\
# HELP meshrl_tokens tokens
# TYPE meshrl_tokens gauge
meshrl_tokens{service="engine/0",kind="engine",job="a \\"quoted\\" job"} 5.0
# HELP meshrl_late_frames_total late_frames
# TYPE meshrl_late_frames_total counter
meshrl_late_frames_total{service="engine/0",kind="engine",job=""} 2.0
"""
SECOND = """\
# HELP meshrl_tokens what is said only once
# TYPE meshrl_tokens gauge
meshrl_tokens{service="engine/0",kind="engine",job="b"} 7.0
# HELP meshrl_late_frames late_frames
# TYPE meshrl_late_frames gauge
meshrl_late_frames 1.0
"""


def merge_example_pages() -> str:
    both = MergedExposition()
    both.add_page(FIRST, {"service": "engine/0", "kind": "engine", "job": "a"})
    both.add_page(SECOND, {"service": "engine/1", "kind": "engine", "job": "b"})
    status, kind, body = both.render()
    assert status == 200 and kind.startswith("text/plain")
    return body.decode()


def test_each_metric_family_appears_once() -> None:
    heads = re.findall(r"^# (HELP|TYPE) (\S+)", merge_example_pages(), re.MULTILINE)
    assert len(heads) == len(set(heads))
    assert len(heads) == 2 * 3


def test_each_sample_is_labelled_with_the_scraped_process() -> None:
    """Check that a page cannot claim the labels of another process."""
    found = [
        (s.name, s.labels["service"], s.labels["job"], s.value)
        for family in text_string_to_metric_families(merge_example_pages())
        for s in family.samples
    ]
    assert sorted(found) == [
        ("meshrl_late_frames", "engine/1", "b", 1.0),
        ("meshrl_late_frames_total", "engine/0", "a", 2.0),
        ("meshrl_tokens", "engine/0", 'a "quoted" job', 5.0),
        ("meshrl_tokens", "engine/1", "b", 7.0),
    ]


def test_name_with_two_types_is_untyped() -> None:
    both = MergedExposition()
    both.add_page("# TYPE x gauge\nx 1\n", {"service": "a"})
    both.add_page("# TYPE x summary\nx 2\n", {"service": "b"})
    assert "# TYPE x untyped" in both.render()[2].decode()


@pytest.mark.parametrize("page", ["meshrl_x{ 1", "<html>", "x{a=b} 1", "meshrl_x one"])
def test_invalid_page_adds_no_samples(page: str) -> None:
    both = MergedExposition()
    with pytest.raises(ValueError):
        both.add_page("# TYPE y gauge\ny 1\n" + page, {"service": "a"})
    assert both.render()[2] == b""


NOW_MS = 1_000_000.0


def job(id: str, phase: Phase = Phase.TRAINING, **more: Any) -> JobRow:
    counts = dict.fromkeys(("opened", "trained", "filtered", "host_lost"), 0)
    row = {
        "document": {"budget": {"steps": 9}},
        "run_dir": "/runs/x",
        "lineage": 0,
        "version": 3,
        "manifest": "",
        "checkpoint": "",
        "steps_done": 3,
        "cursor": 0,
        "admitted": 0,
        "stale_requeued": 4,
        "typed_drops": 2,
        "error": "",
        **counts,
    }
    return JobRow(id=id, phase=phase, **{**row, **more})


def figures(
    hosts: dict[str, str] | None = None, stalls: Sequence[Stall] = (), **rows: Any
) -> dict[str, float]:
    """Return gauge values by name and label values, without the prefix `meshrl_`."""
    found = {}
    for family in make_metric_families(
        HeadSnapshot(MeshSnapshot(now_ms=NOW_MS, **rows), hosts or {}, stalls)
    ):
        for sample in family.samples:
            key = " ".join([sample.name.removeprefix("meshrl_"), *sample.labels.values()])
            assert key not in found
            found[key] = sample.value
    return found


def test_job_gauges_have_steps_phases_and_trajectories() -> None:
    row = {"committed_ms": 940_000, "reward": 0.5, "kl": float("nan"), "manifest": "m"}
    found = figures(jobs=[job("a"), job("b", Phase.FAILED)], steps={"a": [row]})
    assert found["job_steps a"] == 3 and found["job_steps_budget a"] == 9
    assert found["job_phase a training"] == found["job_phase b failed"] == 1
    assert found["job_trajectories a stale_requeued"] == 4
    assert found["job_trajectories b typed_drops"] == 2
    assert found["job_step_age_seconds a"] == 60 and "job_step_age_seconds b" not in found
    assert found["job_last_step a reward"] == 0.5
    assert not [
        name for name in found if name in ("job_last_step a kl", "job_last_step a manifest")
    ]


async def test_health_gauges_count_each_step_once_over_several_reads(tmp_path: Path) -> None:
    bench = Bench(open_simulated_state(SystemClock()), None)
    seats = await bench.training_job()
    (tmp_path / "mesh").mkdir()
    settings = MeshSettings(redis_url="", run_root=str(tmp_path), host="here")
    settings.to_file(MeshPaths(tmp_path).settings)
    reader = HeadReader(MeshPaths(tmp_path))
    for step in range(1, 7):
        for group in await seats.admit():
            await seats.finish(group)
        taken = await seats.leased(step)
        measured = {"reward": 0.5, "sequences": 0, "masters": f"m{step}"}
        names = steps.VersionReferences(f"m{step}", "")
        commit = steps.StepCommit(step, taken, taken, names, measured, {})
        await steps.commit_step(bench.state, BENCH_JOB, TRAINER, seats.trainer, 0, commit)
        head = await reader.read_snapshot(bench.state)
        head = await reader.read_snapshot(bench.state)
        assert [row["step"] for row in head.mesh.steps[BENCH_JOB]] == [step]
        assert head.health[BENCH_JOB].get("all_filtered") == (2 if step >= 5 else None)
    families = {family.name: family for family in make_metric_families(head)}
    values = {s.labels["rule"]: s.value for s in families["meshrl_job_health"].samples}
    assert values["all_filtered"] == 2 and values["learning_rate"] == 0
    await bench.state.close()


def test_blocked_job_has_a_held_gauge_and_no_step_age() -> None:
    rows = [
        job("w", block_reason="waiting: 2 workers of 4"),
        job("p", block_reason="paused: by hand"),
    ]
    found = figures(jobs=rows)
    assert found["job_held w waiting"] == found["job_held p paused"] == 1
    assert not [name for name in found if name.startswith("job_step_age")]


def test_step_age_restarts_when_a_job_starts_or_resumes() -> None:
    steps = {"on": [{"committed_ms": 1_000}]}
    rows = [job("on", blocked_since_ms=990_000), job("new", steps_done=0, created_ms=970_000)]
    found = figures(jobs=rows, steps=steps)
    assert found["job_step_age_seconds on"] == 10 and found["job_step_age_seconds new"] == 30


def test_gangs_are_counted_by_role_and_workers_and_hosts_by_state() -> None:
    both = (Instance("g0.0", "a", Role.ROLLOUT), Instance("g0.1", "a", Role.TRAINING))
    gangs = (Gang("g0", ("w0",), 1, both), Gang("g1", ("w1",), 1))
    workers = (
        WorkerRow("w0", "h", "cpu:0", 1, gang="g0"),
        WorkerRow("w1", "h", "cpu:1", 1),
        WorkerRow("w2", "i", "cpu:0", 1, alive=False),
    )
    found = figures({"h": "up", "i": "away"}, workers=workers, gangs=gangs)
    assert [found[f"gangs {r}"] for r in ("rollout", "training", "scoring", "idle")] == [1, 1, 0, 1]
    assert [found[f"workers {s}"] for s in ("busy", "idle", "away")] == [1, 1, 1]
    assert [found[f"hosts {s}"] for s in ("up", "away", "drained")] == [1, 1, 0]


def test_time_slices_of_a_job_are_counted_by_function() -> None:
    instance = Instance("g0.0", "a", Role.TRAINING, core=True, ranks=(0, 1), time_sliced=True)
    stats = {"instance": "g0.0", "turns": 4, "slice_s": {"sync": 1.5}, "slice_switch_s": 0.5}
    stats |= {"slice_loaded_bytes": 1, "slice_hidden_bytes": 3}
    entries = [RegistryEntry("trainer/a", "trainer", incarnation="i", stats=stats)]
    gangs = (Gang("g0", ("w0", "w1"), 1, (instance,)),)
    found = figures(jobs=[job("a"), job("b")], gangs=gangs, entries=entries)
    assert found["job_slice_seconds a sync"] == 3.0  # on two accelerators
    assert found["job_switch_seconds a"] == 1.0
    assert found["job_hidden_load_share a"] == 0.75
    assert not [name for name in found if name.startswith("job_slice_seconds b")]


def test_leader_stalls_and_exits_have_gauges() -> None:
    stalls = [Stall(w, "engine/0", "generate", 20.0, "") for w in ("rollout/a/0", "rollout/a/1")]
    ends = [LastExit("engine/0", "a", -9, "signal 9", 0, 3, False)]
    found = figures(leader="planner/1", stalls=stalls, last_exits=ends)
    assert found["leader"] == 1 and found["stalls generate"] == 2
    assert found["process_ends engine/0 a"] == 3
    assert figures()["leader"] == 0


HERE = "127.0.0.1:*"
PAGE = b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nx 1\n"


@contextmanager
def serve_parts(
    *parts: bytes, pause_s: float = 0.0, together: threading.Barrier | None = None
) -> Iterator[int]:
    """Run a server for one client that sends the parts in turn and then closes the connection. With
    `together`, it waits until the other servers have clients too.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            if together is not None:
                together.wait(scaled(30.0))
            with client:
                client.recv(1000)
                try:
                    for part in parts:
                        client.sendall(part)
                        ended.wait(pause_s)
                except OSError:  # the client has left
                    pass

        ended = threading.Event()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        ended.set()


def process(port: int, name: str = "engine/0") -> MonitoredProcess:
    return MonitoredProcess(name, "engine", metrics_address=f"http://127.0.0.1:{port}")


def test_slow_and_broken_pages_are_down_and_scraped_concurrently() -> None:
    told: tuple[tuple[list[bytes], float], ...] = (
        ([PAGE], 0.0),
        ([b""], 3600.0),
        ([b"H"] * 10_000, 0.2),
        ([b"HTTP/1.0 500 no\r\n\r\n"], 0.0),
        ([b"HTTP/1.0 200 OK\r\n\r\n\xff"], 0.0),
    )
    together = threading.Barrier(len(told))
    with ExitStack() as opened:
        ports = [
            opened.enter_context(serve_parts(*parts, pause_s=pause_s, together=together))
            for parts, pause_s in told
        ]
        with socket.create_server(("127.0.0.1", 0)) as gone:
            ports.append(gone.getsockname()[1])
        started_s = time.monotonic()
        found = scrape_pages([process(port) for port in ports], HERE)
        took_s = time.monotonic() - started_s
    assert found == ["x 1\n", None, None, None, None, None]
    assert took_s < scaled(10.0), "it waits for none to its end"


def test_process_without_a_page_is_up_by_its_lease() -> None:
    both = [MonitoredProcess("a", "a"), MonitoredProcess("b", "b", is_alive=False)]
    assert scrape_pages(both, HERE) == ["", None]


def test_scrape_contacts_this_host_only() -> None:
    with serve_parts(PAGE) as port:
        elsewhere = MonitoredProcess("a", "a", metrics_address=f"http://192.0.2.1:{port}")
        assert scrape_pages([elsewhere], "0.0.0.0:*") == ["x 1\n"]
