"""The sandbox over real sockets: load once, batches in order, a crisp word after a restart."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.api.sandbox import (
    OK,
    EndSessions,
    JailSettings,
    LoadJob,
    RewardBatch,
    RewardCall,
    RewardPart,
    RunTools,
    Sandbox,
    ToolCall,
)
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import NotFound, PeerLost, Refused, ToolFailed
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.sandbox_request import compute_request_digest
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.process.child_handle import read_start_time
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state import events, registry
from meshrl.common.state.events import Event
from meshrl.services.rollout.rewards.sandbox_client import SandboxClient
from meshrl.services.sandbox.actor import SandboxActor, SandboxIdentity
from meshrl.services.sandbox.outcomes import REPORT_INTERVAL_S, ExitReporter, RedisExitReporter
from meshrl.services.sandbox.workers.calls import PoolCall, PoolFunctions, PoolLimits
from meshrl.services.sandbox.workers.pool import WorkerPool
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from meshrl.view.history.event_text import is_unexpected_exit
from meshrl.view.history.job_events import JobEventFilter
from tests.load import scaled
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.stories import story_on
from tests.unit.sandbox.isolation.test_contract import STANDIN
from tests.unit.sandbox.launching import programs_below
from tests.unit.sandbox.place import Place


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    with tempfile.TemporaryDirectory(prefix="s") as directory:
        made = Place(Path(directory))
        yield made
        await made.close()


def tools(*inputs: str) -> RunTools:
    return RunTools(
        [ToolCall(7 + i, "j", "calculate", x, scaled(5.0)) for i, x in enumerate(inputs)]
    )


async def test_a_job_is_loaded_once_and_its_batches_answered_in_order(place: Place) -> None:
    sandbox = await place.open()
    with pytest.raises(NotFound, match="job j is not loaded"):
        await sandbox.call(Sandbox.run_tools, tools("1+1"), deadline_s=scaled(20))
    for _ in range(2):
        loaded = await sandbox.call(Sandbox.load_job, place.job())
        assert (loaded.job, loaded.workers, loaded.isolation_tier) == ("j", 2, "")
    ran = await sandbox.call(Sandbox.run_tools, tools("1+1", "1/0", "2*3"))
    assert [(o.id, o.status, o.value) for o in ran.outcomes] == [
        (7, "ok", "2"),
        (8, "raised", None),
        (9, "ok", "6"),
    ]
    assert ran.outcomes[1].error == "ZeroDivisionError: division by zero (calc.py:2 in tool())"
    turns = [{"role": "model"}, {"role": "tool"}]
    scored = await sandbox.call(
        Sandbox.score_trajectories, RewardBatch([RewardCall(1, "j", {}, turns, scaled(5.0))])
    )
    assert [(o.status, o.value) for o in scored.outcomes] == [("ok", 2.0)]


async def test_code_that_does_not_import_is_named_and_the_loaded_job_stays(place: Place) -> None:
    sandbox = await place.open()
    await sandbox.call(Sandbox.load_job, place.job())
    with pytest.raises(ToolFailed, match="No module named 'nowhere'"):
        await sandbox.call(Sandbox.load_job, place.job("nowhere:f"))
    assert (await sandbox.call(Sandbox.run_tools, tools("2+2"))).outcomes[0].value == "4"


async def test_a_killed_sandbox_leaves_no_worker_and_its_successor_asks_for_the_job(
    place: Place,
) -> None:
    sandbox = await place.open()
    await sandbox.call(Sandbox.load_job, place.job())
    asked = tools("__import__('os').getpid()")
    worker = int((await sandbox.call(Sandbox.run_tools, asked)).outcomes[0].value)
    os.kill(place.sandbox.pid, 9)
    await place.sandbox.wait(scaled(5))
    async with asyncio.timeout(scaled(5)):
        while read_start_time(worker):
            await asyncio.sleep(0.02)
    await place.evict("sandbox/j/0")
    place.start()
    with pytest.raises(NotFound, match=r"Sandbox\.load"):
        while True:
            with suppress(PeerLost):  # a call may still be on its way to the one that is gone
                await sandbox.call(Sandbox.run_tools, tools("1+1"), deadline_s=scaled(30))
                break
    await sandbox.call(Sandbox.load_job, place.job())
    assert (await sandbox.call(Sandbox.run_tools, tools("1+1"))).outcomes[0].value == "2"


JAILED = {"python": "python", "notebook": "python_session", "sh": "shell", "sum": "calculator"}
CASES = {"function": "f", "cases": [{"args": [x], "output": x + 1} for x in range(4)]}


def jailed(place: Place, **values: Any) -> LoadJob:
    rewards = [RewardPart("exact", 1.0, {"strip": "$"}), RewardPart("code_tests", 0.5, {})]
    return LoadJob("j", str(place.directory), JAILED, rewards, jail=JailSettings(**values))


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap", "python3")
async def test_a_job_with_a_runner_has_a_container_for_each_call(place: Place) -> None:
    sandbox = await place.open()
    standin = {"runner": [STANDIN], "python": "/usr/bin/python3", "tier": "runner"}
    loaded = await sandbox.call(Sandbox.load_job, jailed(place, **standin))
    assert loaded.isolation_tier == "a container for each call (standin)"
    calls = [
        ToolCall(
            0, "j", "python", "import socket\nprint(socket.gethostname(), 6 * 7)", scaled(5.0)
        ),
        ToolCall(1, "j", "notebook", "x = 6", scaled(5.0), "t"),
        ToolCall(2, "j", "notebook", "x * 7", scaled(5.0), "t"),
    ]
    answers = [(await sandbox.call(Sandbox.run_tools, RunTools([c]))).outcomes[0] for c in calls]
    assert [answer.status for answer in answers] == ["ok", "ok", "ok"]
    assert "42" in answers[0].value["output"] and answers[2].value["output"] == "42\n"
    broken = jailed(place, **{**standin, "runner": ["false"]})
    with pytest.raises(Refused) as caught:
        await sandbox.call(Sandbox.load_job, broken)
    assert "takes a container for each call; this host has none" in str(caught.value)
    assert "false: the container ended at its start" in str(caught.value)


async def published(place: Place, rests: bool) -> None:
    """Until the sandbox says whether its end would lose anything."""
    async with asyncio.timeout(scaled(20)):
        while True:
            entry = await registry.lookup(place.caller.state, "sandbox/j/0")
            if entry is not None and entry.stats["rests"] == rests:
                return
            await asyncio.sleep(0.1)


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
async def test_what_the_model_wrote_runs_in_jails_and_is_told_to_it(place: Place) -> None:
    sandbox = await place.open()
    wall_s = min(9.0, round(scaled(1.0), 1))  # below the limit of CPU time
    loaded = await sandbox.call(Sandbox.load_job, jailed(place, output_bytes=2000, wall_s=wall_s))
    assert loaded.isolation_tier.startswith("bwrap + seccomp")
    lost = ToolCall(0, "j", "notebook", "x", scaled(5.0), "gone", has_session_state=True)
    told = (await sandbox.call(Sandbox.run_tools, RunTools([lost]))).outcomes[0]
    assert told.status == "crashed" and "its process was lost" in told.value["output"]
    anew = (await sandbox.call(Sandbox.run_tools, RunTools([lost]))).outcomes[0]
    assert anew.status == "ok" and "NameError" in anew.value["output"]
    calls = [
        ToolCall(0, "j", "python", "print(6 * 7)", scaled(5.0)),
        ToolCall(1, "j", "sh", "echo hi; exit 3", scaled(5.0)),
        ToolCall(2, "j", "notebook", "x = 8\nx", scaled(5.0), "one"),
        ToolCall(3, "j", "sum", "2 + 2", scaled(5.0)),
        ToolCall(4, "j", "python", "while True: pass", scaled(5.0)),
        ToolCall(5, "j", "python", 17, scaled(5.0)),
        ToolCall(6, "j", "python", "1 / 0", scaled(5.0)),
    ]
    found = (await sandbox.call(Sandbox.run_tools, RunTools(calls), deadline_s=scaled(60))).outcomes
    assert [outcome.status for outcome in found] == [*["ok"] * 4, "timeout", "refused", "ok"]
    assert found[0].value == {"status": "ok", "output": "42\n"}
    assert found[1].value == {"status": "ok", "output": "hi\n", "exit": 3}
    assert found[2].value == {"status": "ok", "output": "8\n"}
    assert found[3].value == "4"
    late = f"over {wall_s:g} s of wall clock time"
    assert found[4].value == {"status": "timeout", "output": f"[timeout: {late}]"}
    assert found[5].value["status"] == "refused"
    assert "takes code as a text" in found[5].value["output"]
    assert found[6].value["exit"] == 1 and "ZeroDivisionError" in found[6].value["output"]
    kept = ToolCall(0, "j", "notebook", "x", scaled(5.0), "one")
    assert (await sandbox.call(Sandbox.run_tools, RunTools([kept]))).outcomes[0].value[
        "output"
    ] == "8\n"
    await published(place, False)
    ended = EndSessions("j", ["one", "gone"])
    await sandbox.cast(Sandbox.end_sessions, ended)
    await published(place, True)
    async with asyncio.timeout(scaled(20)):
        while True:
            again = (await sandbox.call(Sandbox.run_tools, RunTools([kept]))).outcomes[0].value
            if "NameError" in again["output"]:
                break
            await asyncio.sleep(0.05)


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
async def test_a_reward_is_the_weighted_sum_of_its_parts(place: Place) -> None:
    sandbox = await place.open()
    await sandbox.call(Sandbox.load_job, jailed(place))
    right = "def f(x):\n    return x + 1"
    row = {"answer": right, "tests": CASES}
    calls = [
        RewardCall(0, "j", row, [{"role": "model", "text": right + "$"}], scaled(5.0)),
        RewardCall(1, "j", row, [{"role": "model", "text": right}], scaled(5.0)),
        RewardCall(2, "j", row, [{"role": "model", "text": "def f(x): return 3"}], scaled(5.0)),
        RewardCall(3, "j", {"tests": CASES}, [{"role": "model", "text": "x"}], scaled(5.0)),
    ]
    found = (
        await sandbox.call(Sandbox.score_trajectories, RewardBatch(calls), deadline_s=scaled(60))
    ).outcomes
    assert [o.status for o in found] == ["ok", "ok", "ok", "raised"]
    # "$" is stripped by `exact` alone: to `code_tests` it is a syntax error.
    assert [o.value for o in found[:3]] == [1.0, 1.5, 0.125]
    assert "the row has no 'answer'" in found[3].error


async def test_a_host_that_contains_too_little_refuses_the_job_with_the_fix(place: Place) -> None:
    await place.open()
    with tempfile.TemporaryDirectory() as empty:
        place.spawned("sandbox/j/1", path=empty)  # no bwrap there
        other = place.caller.ref("sandbox/j/1")
        with pytest.raises(Refused, match=r"takes bwrap \+ seccomp.*this host has .*bubblewrap"):
            await other.call(Sandbox.load_job, jailed(place), deadline_s=scaled(60))
        trusted = LoadJob("j", str(place.directory), {"calculate": "calc:tool"})
        assert (await other.call(Sandbox.load_job, trusted)).isolation_tier == ""


MODULE = """
import os, time
from pathlib import Path

def tool(x):
    return str(eval(x))

def slow(directory):
    guard = Path(f"/proc/{os.getppid()}/stat").read_text()
    parent = int(guard.rpartition(")")[2].split()[1])
    Path(directory, f"begun-{parent}-{os.getpid()}").touch()
    while not Path(directory, "go").exists():
        time.sleep(0.005)
    return parent

def reward(row, turns):
    return len(turns)
"""


SLEEPS = "import subprocess; subprocess.run(['sleep', '9'])"


async def sleeping(sandbox: int) -> None:
    """Waits until a cell of `SLEEPS` runs in the sandbox with that pid."""
    async with asyncio.timeout(scaled(60)):
        while "sleep" not in programs_below(sandbox):
            await asyncio.sleep(0.01)


async def begun(place: Place, sandbox: int) -> None:
    """Waits until a call of `slow` runs in the sandbox with that pid."""
    async with asyncio.timeout(scaled(60)):
        while not list(place.directory.glob(f"begun-{sandbox}-*")):
            await asyncio.sleep(0.01)


def data(place: Place, job: str = "j", **environment: Any) -> JobData:
    tools = {"slow": "calc:slow", "calculate": "calc:tool", "notebook": "python_session"}
    config = JobConfig.from_document(
        {
            "environment": {"tools": tools, **environment},
            "reward": {"use": "calc:reward"},
        }
    )
    bundle = place.directory / "bundle"
    (bundle / "modules").mkdir(parents=True, exist_ok=True)
    (bundle / "modules" / "calc.py").write_text(MODULE)
    return JobData(job, config, bundle, place.directory)


async def alive(place: Place, *names: str) -> None:
    async with asyncio.timeout(scaled(60)):
        while {e.name for e in await registry.list_entries(place.caller.state) if e.alive} < set(
            names
        ):
            await asyncio.sleep(0.05)


@pytest.mark.rotating(3)
async def test_calls_are_spread_over_sandboxes_and_move_from_a_dead_one(place: Place) -> None:
    await place.open()
    second = place.spawned("sandbox/j/1")
    await alive(place, "sandbox/j/0", "sandbox/j/1")
    client = SandboxClient(place.caller, data(place))
    await client.load_job()
    calls = []
    for _ in range(4):  # each in a batch of its own, as they do not come together
        calls.append(asyncio.create_task(client.call_tool("slow", str(place.directory))))
        await asyncio.sleep(0.1)
    await begun(place, place.sandbox.pid)
    await begun(place, second.pid)
    second.kill()
    await second.wait(scaled(5))
    await place.evict("sandbox/j/1")
    (place.directory / "go").touch()
    pids = await asyncio.gather(*calls)
    assert set(pids) == {place.sandbox.pid}
    assert await client.call_tool("calculate", "6*7") == "42"
    assert await client.compute_reward({}, [{}, {}]) == 2.0
    await client.close()


@pytest.mark.rotating(3)
async def test_a_job_that_eats_its_sandbox_does_not_delay_another(place: Place) -> None:
    sandbox = await place.open()
    place.spawned("sandbox/k/0")
    await alive(place, "sandbox/j/0", "sandbox/k/0")
    with pytest.raises(Refused, match="it serves job j, and not k"):
        await sandbox.call(Sandbox.load_job, LoadJob("k", str(place.directory), {}))
    eats, other = (SandboxClient(place.caller, data(place, job)) for job in "jk")
    await eats.load_job()
    await other.load_job()
    hanging = [asyncio.create_task(eats.call_tool("slow", str(place.directory))) for _ in range(40)]
    await begun(place, place.sandbox.pid)
    async with asyncio.timeout(scaled(5)):
        assert await other.call_tool("calculate", "6*7") == "42"
        assert await other.compute_reward({}, [{}]) == 1.0
    assert not any(task.done() for task in hanging)
    (place.directory / "go").touch()
    assert set(await asyncio.gather(*hanging)) == {place.sandbox.pid}
    for client in (eats, other):
        await client.close()


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
async def test_what_must_not_run_twice_comes_back_as_crashed(place: Place) -> None:
    await place.open()
    client = SandboxClient(place.caller, data(place, once=["slow"]))
    await client.load_job()
    assert await client.call_tool("notebook", "x = 4\nx", "t1") == {"status": "ok", "output": "4\n"}
    once = asyncio.create_task(client.call_tool("slow", str(place.directory)))
    cell = asyncio.create_task(client.call_tool("notebook", SLEEPS, "t1"))
    await begun(place, place.sandbox.pid)
    await sleeping(place.sandbox.pid)
    place.sandbox.kill()
    await place.sandbox.wait(scaled(5))
    await place.evict("sandbox/j/0")
    place.start()
    for answer in await asyncio.gather(once, cell):
        assert answer["status"] == "crashed" and "was lost" in answer["output"]
    told = [("notebook", "", answer)]
    after = await client.call_tool("notebook", "'x' in globals()", "t1", told)
    assert after == {"status": "ok", "output": "False\n"}
    held = [("notebook", "x = 1", {"status": "ok", "output": ""})]
    lost = await client.call_tool("notebook", "x", "t2", held)
    assert lost["status"] == "crashed" and "its process was lost" in lost["output"]
    client.end_session("t1")
    await client.close()


TOLD = LoadJob("j", "/runs/j/bundle/modules", {}, bundle="d1")
OTHERS = {
    "other modules": replace(TOLD, bundle_dir="/tmp/mine"),
    "another bundle": replace(TOLD, bundle="d2"),
    "a tool": replace(TOLD, tools={"run": "os:system"}),
    "a reward": replace(TOLD, rewards=[RewardPart("os:system")]),
    "a server": replace(TOLD, mcp={"files": ["sh", "-c", "true"]}),
    "another interpreter": replace(TOLD, jail=JailSettings(python="/tmp/python")),
    "a runner": replace(TOLD, jail=JailSettings(runner=["sh"])),
    "a weaker jail": replace(TOLD, jail=JailSettings(min_tier="none")),
}


@pytest.mark.parametrize("what", OTHERS)
async def test_a_shard_that_brings_other_code_than_the_document_has_is_refused(what: str) -> None:
    actor = SandboxActor(
        SystemHost(),
        SystemClock(),
        None,
        PoolLimits(),
        SandboxIdentity("sandbox/j/0", "j", compute_request_digest(TOLD)),
    )
    with pytest.raises(Refused, match="what the job's document does not say"):
        await actor.load_job(OTHERS[what])
    assert (await actor.load_job(TOLD)).job == "j"
    with pytest.raises(Refused, match="what the job's document does not say"):
        await actor.load_job(OTHERS[what])
    await actor.stop()


def test_a_request_that_has_travelled_has_the_same_digest() -> None:
    whole = replace(TOLD, rewards=[RewardPart("exact", 1, {"b": 1, "a": [0.5, None]})])
    other = replace(TOLD, rewards=[RewardPart("exact", 1.0, {"a": [0.5, None], "b": 1})])
    assert (
        compute_request_digest(whole)
        == compute_request_digest(other)
        != compute_request_digest(TOLD)
    )


def counted(found: list[Event]) -> list[tuple[str, int]]:
    """Name and number of the ends that a run counts."""
    return [(e.fields["name"], e.fields["count"]) for e in found if is_unexpected_exit(e)]


@story_on(run_virtual, given=2)
async def test_ends_of_a_name_are_one_event_in_seconds(clock: VirtualClock, random: Random) -> None:
    mesh = alone("sandbox/calc/0", clock, random, SimulatedHost(clock, random))
    ends = RedisExitReporter(mesh.state, clock, "sandbox/calc/0", "calc")
    ends.record_exit("worker of calc", -11, "it ended by SIGSEGV", None, "calc")
    await clock.sleep(0.1)
    for _ in range(40):
        ends.record_exit("worker of calc", -11, "it ended by SIGSEGV", None, "calc")
    ends.record_exit("zygote", -9, "it was killed: somebody has stopped it (pid 7)", None)
    await clock.sleep(2 * REPORT_INTERVAL_S)
    told = await events.read_all(mesh.state)
    name = "worker of calc of sandbox/calc/0"
    assert counted(told) == [(name, 1), (name, 40), ("zygote of sandbox/calc/0", 1)]
    assert told[1].fields["times"] == 41 and told[1].fields["job"] == "calc"
    assert all(JobEventFilter("calc").accept(event) for event in told)
    assert not any(JobEventFilter("other").accept(event) for event in told)
    ends.stop()


async def test_a_killed_worker_is_told_and_one_that_served_its_time_is_not(tmp_path: Path) -> None:
    class Heard(ExitReporter):
        def record_exit(
            self, name: str, code: int, why: str, log: Path | None, job: str = ""
        ) -> None:
            heard.append((name, code, why))

    heard: list[tuple[str, int, str]] = []
    (tmp_path / "tools.py").write_text("import os\ndef pid(x): return os.getpid()\n")
    pool = WorkerPool(
        SystemHost(),
        SystemClock(),
        PoolFunctions("calc", str(tmp_path), {"tool:pid": "tools:pid"}),
        PoolLimits(warm_workers=1, max_workers=1, max_calls_per_worker=2),
        exit_reporter=Heard(),
    )
    await pool.start()
    try:
        seen = [(await pool.run([PoolCall("tool:pid", [0], scaled(20.0))]))[0] for _ in range(3)]
        assert {answer.status for answer in seen} == {OK}
        assert seen[1].value != seen[2].value and heard == [], "it has served its time"
        os.kill(seen[2].value, signal.SIGKILL)
        (answer,) = await pool.run([PoolCall("tool:pid", [0], scaled(20.0))])
        assert answer.status == OK and answer.value != seen[2].value
        ((name, code, _),) = heard
        assert (name, code) == ("worker of calc", -signal.SIGKILL)
    finally:
        await pool.stop()
