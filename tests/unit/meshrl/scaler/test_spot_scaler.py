"""Loop that follows the planner's plan of spot hosts, with the real scripts and real programs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from meshrl.commands.doctor import ERROR, OK, check_scaler
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, Fenced, MeshError
from meshrl.common.state import events, leader
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.store.spot_scaling import (
    FAILED_EVENT,
    RELEASED,
    SCALED_EVENT,
    ScalerReport,
    ScalingPlan,
    read_scaler_report,
)
from meshrl.common.state.pool.workers.settings import PoolSettings, ScalerSettings
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import PLANNER_ELECTION
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.checks.scaler_checks import find_scaler_problem
from meshrl.launch.head.mesh_shape import MeshShape
from meshrl.launch.scaler.providers import CommandProvider, ScaleRequest
from meshrl.launch.scaler.spot_scaler import (
    MAX_RETRY_S,
    REPEAT_S,
    RETRY_S,
    SpotScaler,
    create_scaler,
)
from meshrl.launch.up_down import UpOptions, read_mesh_file, up
from meshrl.services.planner.memory import PlannerMemory
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.view.live.mesh_tables import list_scaler_lines
from tests.load import scaled

MEMBERS = {"spot-1": "10.0.0.1", "spot-2": "10.0.0.2"}
SETTINGS = ScalerSettings(command=["provider"], most=6, workers_per_host=2, release_after_s=60.0)


class HandClock(SystemClock):
    """Clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 1_750_000_000.0

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s


class RecordingProvider:
    """Provider that records requests, and fails while `failure` is set."""

    def __init__(self) -> None:
        self.requests: list[ScaleRequest] = []
        self.failure = ""

    async def scale(self, request: ScaleRequest) -> None:
        self.requests.append(request)
        if self.failure:
            raise MeshError(self.failure, where="pool.scaler.command", fix="Read its log")


class ScalerBench:
    """Scaler of a mesh whose planner's plan a test writes."""

    def __init__(self, directory: Path) -> None:
        self.clock, self.directory = HandClock(), directory
        self.state: StateClient = open_simulated_state(self.clock)
        self.provider, self.token = RecordingProvider(), 0
        self.members: dict[str, str] = dict(MEMBERS)
        self.plan = ScalingPlan(since_ms=1)
        self.scaler = self.start()

    def start(self, settings: ScalerSettings = SETTINGS) -> SpotScaler:
        """Start a scaler, as a launcher of this mesh does."""
        self.scaler = SpotScaler(
            self.state, self.clock, settings, self.provider, self.directory, lambda: self.members
        )
        return self.scaler

    async def write_plan(self, **fields: Any) -> None:
        """Write a plan as the leader of the planners does, elected if there is none."""
        self.plan = replace(self.plan, **fields)
        owner = "planner/0#1"
        self.token = await leader.campaign(self.state, PLANNER_ELECTION, owner, 10**9) or self.token
        memory = PlannerMemory(scaling=self.plan).encode()
        op = f"op{self.clock.now_s}{self.plan}"
        await pool.write_decisions(self.state, self.token, op, [], json.loads(json.dumps(memory)))

    async def poll(self, after_s: float = 1.0) -> list[tuple[int, list[str]]]:
        """Poll once, some seconds later; return the hosts and releases requested so far."""
        self.clock.now_s += after_s
        await self.scaler.poll_once()
        return [(request.hosts, sorted(request.release)) for request in self.provider.requests]

    async def read_events(self, kind: str) -> list[Mapping[str, Any]]:
        return [e.fields for e in await events.read_all(self.state, "0") if e.kind == kind]

    async def read_report(self) -> ScalerReport:
        report = await read_scaler_report(self.state)
        assert report is not None
        return report


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[ScalerBench]:
    found = ScalerBench(tmp_path)
    yield found
    await found.state.close()


async def test_plan_is_requested_once_and_reported(bench: ScalerBench) -> None:
    assert await bench.poll() == [], "no planner has written yet"
    await bench.write_plan(hosts=2, reason="calc wants 4")
    assert await bench.poll() == [(2, [])]
    assert bench.provider.requests[0].workers == 4
    await bench.write_plan(present=2)
    assert await bench.poll() == [(2, [])]
    assert await bench.poll(3600.0) == [(2, [])]
    assert await bench.read_report() == ScalerReport(2, 2, reason="calc wants 4")
    [event] = await bench.read_events(SCALED_EVENT)
    assert (event["hosts"], event["workers"]) == (2, 4)


async def test_restarted_head_requests_nothing_twice(bench: ScalerBench) -> None:
    await bench.write_plan(hosts=3, present=0)
    assert await bench.poll() == [(3, [])]
    bench.start()
    assert await bench.poll(REPEAT_S / 2) == [(3, [])], "its hosts may be away for a moment"
    await bench.write_plan(present=3)
    assert await bench.poll(3600.0) == [(3, [])]


async def test_missing_hosts_are_requested_again_ever_more_rarely(bench: ScalerBench) -> None:
    await bench.write_plan(hosts=2)
    await bench.poll()
    times: list[float] = []
    for second in range(1000):
        known = len(bench.provider.requests)
        await bench.poll()
        if len(bench.provider.requests) > known:
            times.append(second + 1.0)
    assert times == [REPEAT_S, 3 * REPEAT_S, 7 * REPEAT_S, 15 * REPEAT_S]
    assert {request.hosts for request in bench.provider.requests} == {2}


async def test_lost_host_is_requested_at_once_but_not_too_often(bench: ScalerBench) -> None:
    await bench.write_plan(hosts=2)
    await bench.poll()
    await bench.write_plan(present=2)
    await bench.poll(REPEAT_S)
    for _ in range(2):
        await bench.write_plan(present=1)
        sent = len(bench.provider.requests)
        assert len(await bench.poll()) == sent + 1
        assert len(await bench.poll(REPEAT_S / 2)) == sent + 1
        await bench.write_plan(present=2)
        assert len(await bench.poll(REPEAT_S)) == sent + 1


async def test_failed_request_is_reported_and_repeated_with_growing_pauses(
    bench: ScalerBench,
) -> None:
    bench.provider.failure = "no capacity"
    await bench.write_plan(hosts=1)
    await bench.poll()
    report = await bench.read_report()
    assert report.error == "no capacity (at pool.scaler.command). Read its log"
    assert (report.hosts, report.failures) == (1, 1)
    assert report.retry_ms == int(1000 * (bench.clock.now_s + RETRY_S))
    [event] = await bench.read_events(FAILED_EVENT)
    assert (event["hosts"], event["retry_s"]) == (1, RETRY_S)
    await bench.write_plan(hosts=3)  # a changed plan does not shorten the pause
    assert await bench.poll(RETRY_S / 2) == [(1, [])]
    assert await bench.poll(RETRY_S / 2) == [(1, []), (3, [])]
    for _ in range(12):
        await bench.poll(MAX_RETRY_S)
    pauses = [event["retry_s"] for event in await bench.read_events(FAILED_EVENT)]
    assert pauses[:4] == [2.0, 4.0, 8.0, 16.0] and pauses[-1] == MAX_RETRY_S
    bench.provider.failure = ""
    await bench.write_plan(present=3)
    await bench.poll(MAX_RETRY_S)
    assert (await bench.read_report()).error == ""
    sent = len(bench.provider.requests)
    await bench.poll(3600.0)
    assert len(bench.provider.requests) == sent


async def test_host_is_drained_and_empty_before_it_is_given_back(bench: ScalerBench) -> None:
    await bench.write_plan(hosts=2, present=2)
    await bench.poll()
    await bench.state.run_command("SET", "{mesh}:services:spot-1", json.dumps(["rollout/calc/0"]))
    await bench.write_plan(hosts=0, release=("spot-1", "spot-2"))
    await bench.poll()
    assert await pool.read_drain_reasons(bench.state) == {"spot-1": RELEASED, "spot-2": RELEASED}
    assert (await bench.poll())[1:] == [(1, ["spot-2"])], "a shard is on the other one"
    await bench.state.run_command("DEL", "{mesh}:services:spot-1")
    await bench.write_plan(present=1, release=("spot-1",))
    assert (await bench.poll())[2:] == [(0, ["spot-1"])]
    assert list(bench.provider.requests[-1].release.values()) == ["10.0.0.1"]
    await bench.write_plan(present=0, release=())
    await bench.poll()
    assert await pool.read_drain_reasons(bench.state) == {}


async def test_drain_ends_when_demand_returns_and_others_drains_stay(bench: ScalerBench) -> None:
    await bench.write_plan(hosts=2, present=2)
    await bench.poll()
    await pool.set_drain_reason(bench.state, "spot-2", "maintenance")
    await bench.write_plan(hosts=1, release=("spot-1", "spot-2"))
    await bench.poll()
    reasons = {"spot-1": RELEASED, "spot-2": "maintenance"}
    assert await pool.read_drain_reasons(bench.state) == reasons
    await bench.write_plan(hosts=2, release=())
    await bench.poll()
    assert await pool.read_drain_reasons(bench.state) == {"spot-2": "maintenance"}
    assert {request.hosts for request in bench.provider.requests} == {2}


async def test_plan_beyond_the_settings_is_bounded(bench: ScalerBench) -> None:
    """Check the bounds: a joined host's standby planner may write any plan."""
    await bench.write_plan(hosts=10**6, release=("head", "$(reboot)"))
    assert await bench.poll() == [(3, [])]
    assert await pool.read_drain_reasons(bench.state) == {}
    await bench.write_plan(hosts=-5, release=())
    assert await bench.poll() == [(3, []), (0, [])]


async def test_lost_memory_of_the_planner_ends_no_host_soon(bench: ScalerBench) -> None:
    await bench.write_plan(hosts=3, present=3)
    await bench.poll()
    now_ms = int(1000 * bench.clock.now_s)
    await bench.write_plan(hosts=0, present=0, since_ms=now_ms)  # its hosts are away for a moment
    assert await bench.poll(30.0) == [(3, [])]
    assert await bench.poll(40.0) == [(3, []), (0, [])]


async def test_former_leader_changes_no_plan(bench: ScalerBench) -> None:
    await bench.write_plan(hosts=1, present=1)
    assert await bench.poll() == [(1, [])]
    former = bench.token
    await bench.state.run_command("DEL", f"{{mesh}}:leader:{PLANNER_ELECTION}")
    assert await leader.campaign(bench.state, PLANNER_ELECTION, "planner/1#1", 10**9) > former
    with pytest.raises(Fenced):
        await pool.write_decisions(bench.state, former, "late", [], {"scaling": {"hosts": 3}})
    assert await bench.poll() == [(1, [])]


async def test_dry_run_requests_and_drains_nothing(bench: ScalerBench) -> None:
    await pool.set_drain_reason(bench.state, "spot-2", RELEASED)  # of an earlier start
    bench.start(replace(SETTINGS, dry_run=True))
    await bench.write_plan(hosts=2, present=2, release=("spot-1",), reason="calc wants 4")
    assert await bench.poll() == []
    await bench.poll()
    assert await pool.read_drain_reasons(bench.state) == {}
    [event] = await bench.read_events(SCALED_EVENT)
    assert event["dry_run"] and event["hosts"] == 2
    lines, errors = list_scaler_lines(await bench.read_report())
    assert not errors and lines == [
        "spot hosts: dry run, nothing is requested: 2 up, 2 requested (calc wants 4); "
        "given back: spot-1"
    ]


async def test_mesh_without_scaler_has_no_report_and_uses_all_hosts(bench: ScalerBench) -> None:
    await bench.write_plan(hosts=1)
    await bench.poll()
    await pool.set_drain_reason(bench.state, "spot-1", RELEASED)
    paths = MeshPaths(bench.directory)
    assert await create_scaler(bench.state, bench.clock, ScalerSettings(), paths) is None
    assert await read_scaler_report(bench.state) is None
    assert await pool.read_drain_reasons(bench.state) == {}
    assert list_scaler_lines(None) == ([], [])


async def test_program_scales_hosts_up_and_down(bench: ScalerBench) -> None:
    """Follow a plan by a program that keeps a file for each of its hosts."""
    hosts = bench.directory / "hosts"
    hosts.mkdir()
    script = f"""
        cd {hosts}
        for host in $MESHRL_RELEASE_HOSTS; do rm -f $host; done
        n=$(ls | wc -l); i=1
        while [ $n -lt $2 ]; do
            [ -e spot-$i ] || {{ touch spot-$i; n=$((n+1)); }}
            i=$((i+1))
        done"""
    program = ["sh", "-ec", script, "provider"]
    log = bench.directory / "log"
    bench.provider = CommandProvider(program, scaled(20.0), log)  # type: ignore[assignment]
    bench.start()
    for present, wanted, release in ((0, 2, ()), (2, 2, ()), (2, 1, ("spot-1",)), (1, 2, ())):
        await bench.write_plan(present=present, hosts=wanted, release=release)
        for _ in range(3):
            bench.clock.now_s += 1.0
            await bench.scaler.poll_once()
        assert len(list(hosts.iterdir())) == wanted, log.read_text()
        assert not any((hosts / name).exists() for name in release)
    assert (await bench.read_report()).error == ""


def test_failure_is_a_line_of_its_own() -> None:
    lines, [error] = list_scaler_lines(ScalerReport(3, 1, error="no capacity", failures=2))
    assert lines == ["spot hosts: 1 up, 3 requested ()"]
    assert error.startswith("the scaler of spot hosts failed 2 times, again at ")
    assert error.endswith(": no capacity")


@pytest.mark.parametrize(
    ("scaler", "key"),
    [
        ({}, ""),
        ({"command": ["sh"], "most": 2}, ""),
        ({"command": ["sh"], "kubernetes": "a/deployment/b", "most": 2}, "command"),
        ({"command": ["sh"]}, "most"),
        ({"command": ["sh"], "most": 1, "workers_per_host": 2}, "most"),
        ({"command": ["sh"], "most": 2, "max_cost_per_hour": 2.0}, "max_cost_per_hour"),
        ({"command": ["/none"], "most": 2}, "command"),
        ({"kubernetes": "worker", "most": 2}, "kubernetes"),
        ({"kubernetes": "a/deployment/b", "most": 2}, "kubernetes"),
        ({"kubernetes": "a/deployment/b", "most": 2, "dry_run": True}, ""),
    ],
)
def test_settings_are_checked_on_the_head(
    scaler: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    pool_settings = PoolSettings(scaler=ScalerSettings(**scaler))
    problem = find_scaler_problem(pool_settings)
    assert (problem.key if problem is not None else "") == key
    assert PoolSettings.from_document(asdict(pool_settings)) == pool_settings


def test_mesh_file_without_a_usable_provider_is_rejected_by_line(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text('[pool.scaler]\ncommand = ["/none"]\nmost = 4\n')
    with pytest.raises(ConfigError, match=r"line 2: pool\.scaler\.command names /none, no program"):
        read_mesh_file(path)
    path.write_text('[pool.scaler]\ncommand = ["sh"]\nmost = 4\n')
    assert read_mesh_file(path).pool.scaler == ScalerSettings(command=["sh"], most=4)
    with pytest.raises(ConfigError, match="spot hosts cannot join this head"):
        up(tmp_path / "mesh", MeshShape(workers=1), UpOptions(config_file=path))
    assert not (tmp_path / "mesh").exists()


@pytest.mark.parametrize(("command", "level"), [("sh", OK), ("/none", ERROR)])
def test_doctor_checks_the_provider_of_this_mesh(command: str, level: str) -> None:
    finding = check_scaler(PoolSettings(scaler=ScalerSettings(command=[command], most=1)))
    assert (finding.level, finding.subject) == (level, "scaler") and command in finding.detail
