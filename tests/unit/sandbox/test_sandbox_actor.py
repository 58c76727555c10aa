"""Sandbox actor over real sockets: loading, ordered batches, and restarts."""

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
from tests.unit.sandbox.launching import list_descendant_programs
from tests.unit.sandbox.sandbox_bench import SandboxBench


@pytest.fixture
async def bench() -> AsyncIterator[SandboxBench]:
    with tempfile.TemporaryDirectory(prefix="s") as directory:
        new_bench = SandboxBench(Path(directory))
        yield new_bench
        await new_bench.close()


def make_tool_calls(*inputs: str) -> RunTools:
    return RunTools(
        [ToolCall(7 + i, "j", "calculate", x, scaled(5.0)) for i, x in enumerate(inputs)]
    )


async def test_loaded_job_answers_batches_in_order(bench: SandboxBench) -> None:
    sandbox = await bench.open()
    with pytest.raises(NotFound, match="job j is not loaded"):
        await sandbox.call(Sandbox.run_tools, make_tool_calls("1+1"), deadline_s=scaled(20))
    for _ in range(2):
        loaded = await sandbox.call(Sandbox.load_job, bench.make_job())
        assert (loaded.job, loaded.workers, loaded.isolation_tier) == ("j", 2, "")
    answer = await sandbox.call(Sandbox.run_tools, make_tool_calls("1+1", "1/0", "2*3"))
    assert [(o.id, o.status, o.value) for o in answer.outcomes] == [
        (7, "ok", "2"),
        (8, "raised", None),
        (9, "ok", "6"),
    ]
    assert answer.outcomes[1].error == "ZeroDivisionError: division by zero (calc.py:2 in tool())"
    turns = [{"role": "model"}, {"role": "tool"}]
    scored = await sandbox.call(
        Sandbox.score_trajectories, RewardBatch([RewardCall(1, "j", {}, turns, scaled(5.0))])
    )
    assert [(o.status, o.value) for o in scored.outcomes] == [("ok", 2.0)]


async def test_failing_import_is_named_and_the_loaded_job_stays(bench: SandboxBench) -> None:
    sandbox = await bench.open()
    await sandbox.call(Sandbox.load_job, bench.make_job())
    with pytest.raises(ToolFailed, match="No module named 'nowhere'"):
        await sandbox.call(Sandbox.load_job, bench.make_job("nowhere:f"))
    assert (await sandbox.call(Sandbox.run_tools, make_tool_calls("2+2"))).outcomes[0].value == "4"


async def test_killed_sandbox_leaves_no_worker_and_its_successor_needs_a_load(
    bench: SandboxBench,
) -> None:
    sandbox = await bench.open()
    await sandbox.call(Sandbox.load_job, bench.make_job())
    request = make_tool_calls("__import__('os').getpid()")
    worker = int((await sandbox.call(Sandbox.run_tools, request)).outcomes[0].value)
    os.kill(bench.sandbox.pid, 9)
    await bench.sandbox.wait(scaled(5))
    async with asyncio.timeout(scaled(5)):
        while read_start_time(worker):
            await asyncio.sleep(0.02)
    await bench.evict("sandbox/j/0")
    bench.start()
    with pytest.raises(NotFound, match=r"Sandbox\.load"):
        while True:
            with suppress(PeerLost):  # a call may still be in flight to the killed one
                await sandbox.call(Sandbox.run_tools, make_tool_calls("1+1"), deadline_s=scaled(30))
                break
    await sandbox.call(Sandbox.load_job, bench.make_job())
    assert (await sandbox.call(Sandbox.run_tools, make_tool_calls("1+1"))).outcomes[0].value == "2"


JAILED = {"python": "python", "notebook": "python_session", "sh": "shell", "sum": "calculator"}
CASES = {"function": "f", "cases": [{"args": [x], "output": x + 1} for x in range(4)]}


def make_jailed_job(bench: SandboxBench, **values: Any) -> LoadJob:
    rewards = [RewardPart("exact", 1.0, {"strip": "$"}), RewardPart("code_tests", 0.5, {})]
    return LoadJob("j", str(bench.directory), JAILED, rewards, jail=JailSettings(**values))


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap", "python3")
async def test_job_with_a_runner_gets_a_container_for_each_call(bench: SandboxBench) -> None:
    sandbox = await bench.open()
    standin = {"runner": [STANDIN], "python": "/usr/bin/python3", "min_tier": "runner"}
    loaded = await sandbox.call(Sandbox.load_job, make_jailed_job(bench, **standin))
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
    broken_job = make_jailed_job(bench, **{**standin, "runner": ["false"]})
    with pytest.raises(Refused) as raised:
        await sandbox.call(Sandbox.load_job, broken_job)
    assert "needs a container for each call; this host has none" in str(raised.value)
    assert "false: the container exited during its start" in str(raised.value)


async def wait_until_published(bench: SandboxBench, safe_to_evict: bool) -> None:
    """Wait until the sandbox publishes whether it is safe to evict."""
    async with asyncio.timeout(scaled(20)):
        while True:
            entry = await registry.lookup(bench.caller.state, "sandbox/j/0")
            if entry is not None and entry.stats["safe_to_evict"] == safe_to_evict:
                return
            await asyncio.sleep(0.1)


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
async def test_model_code_runs_in_jails_and_its_output_is_returned(bench: SandboxBench) -> None:
    sandbox = await bench.open()
    wall_s = min(9.0, round(scaled(1.0), 1))  # below the CPU time limit
    loaded = await sandbox.call(
        Sandbox.load_job, make_jailed_job(bench, output_bytes=2000, wall_s=wall_s)
    )
    assert loaded.isolation_tier.startswith("bwrap + seccomp")
    lost_call = ToolCall(0, "j", "notebook", "x", scaled(5.0), "gone", has_session_state=True)
    crashed = (await sandbox.call(Sandbox.run_tools, RunTools([lost_call]))).outcomes[0]
    assert crashed.status == "crashed" and "its process was lost" in crashed.value["output"]
    restarted = (await sandbox.call(Sandbox.run_tools, RunTools([lost_call]))).outcomes[0]
    assert restarted.status == "ok" and "NameError" in restarted.value["output"]
    calls = [
        ToolCall(0, "j", "python", "print(6 * 7)", scaled(5.0)),
        ToolCall(1, "j", "sh", "echo hi; exit 3", scaled(5.0)),
        ToolCall(2, "j", "notebook", "x = 8\nx", scaled(5.0), "one"),
        ToolCall(3, "j", "sum", "2 + 2", scaled(5.0)),
        ToolCall(4, "j", "python", "while True: pass", scaled(5.0)),
        ToolCall(5, "j", "python", 17, scaled(5.0)),
        ToolCall(6, "j", "python", "1 / 0", scaled(5.0)),
    ]
    outcomes = (
        await sandbox.call(Sandbox.run_tools, RunTools(calls), deadline_s=scaled(60))
    ).outcomes
    assert [outcome.status for outcome in outcomes] == [*["ok"] * 4, "timeout", "refused", "ok"]
    assert outcomes[0].value == {"status": "ok", "output": "42\n"}
    assert outcomes[1].value == {"status": "ok", "output": "hi\n", "exit": 3}
    assert outcomes[2].value == {"status": "ok", "output": "8\n"}
    assert outcomes[3].value == "4"
    timeout_text = f"over {wall_s:g} s of wall clock time"
    assert outcomes[4].value == {"status": "timeout", "output": f"[timeout: {timeout_text}]"}
    assert outcomes[5].value["status"] == "refused"
    assert "accepts code as a text" in outcomes[5].value["output"]
    assert outcomes[6].value["exit"] == 1 and "ZeroDivisionError" in outcomes[6].value["output"]
    session_call = ToolCall(0, "j", "notebook", "x", scaled(5.0), "one")
    assert (await sandbox.call(Sandbox.run_tools, RunTools([session_call]))).outcomes[0].value[
        "output"
    ] == "8\n"
    await wait_until_published(bench, False)
    end_request = EndSessions("j", ["one", "gone"])
    await sandbox.cast(Sandbox.end_sessions, end_request)
    await wait_until_published(bench, True)
    async with asyncio.timeout(scaled(20)):
        while True:
            value = (
                (await sandbox.call(Sandbox.run_tools, RunTools([session_call]))).outcomes[0].value
            )
            if "NameError" in value["output"]:
                break
            await asyncio.sleep(0.05)


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
async def test_reward_is_the_weighted_sum_of_its_parts(bench: SandboxBench) -> None:
    sandbox = await bench.open()
    await sandbox.call(Sandbox.load_job, make_jailed_job(bench))
    right = "def f(x):\n    return x + 1"
    row = {"answer": right, "tests": CASES}
    calls = [
        RewardCall(0, "j", row, [{"role": "model", "text": right + "$"}], scaled(5.0)),
        RewardCall(1, "j", row, [{"role": "model", "text": right}], scaled(5.0)),
        RewardCall(2, "j", row, [{"role": "model", "text": "def f(x): return 3"}], scaled(5.0)),
        RewardCall(3, "j", {"tests": CASES}, [{"role": "model", "text": "x"}], scaled(5.0)),
    ]
    outcomes = (
        await sandbox.call(Sandbox.score_trajectories, RewardBatch(calls), deadline_s=scaled(60))
    ).outcomes
    assert [o.status for o in outcomes] == ["ok", "ok", "ok", "raised"]
    # "$" is stripped by `exact` only: for `code_tests` it is a syntax error.
    values = [(o.value["reward"], *o.value["metrics"].values()) for o in outcomes[:3]]
    assert values == [(1.0, 1.0, 0.0), (1.5, 1.0, 1.0), (0.125, 0.0, 0.25)]
    assert list(outcomes[0].value["metrics"]) == ["exact", "code_tests"]
    assert "the row has no 'answer'" in outcomes[3].error


async def test_host_without_the_isolation_tier_rejects_the_job(bench: SandboxBench) -> None:
    await bench.open()
    with tempfile.TemporaryDirectory() as empty_path:
        bench.spawn_sandbox("sandbox/j/1", path=empty_path)  # without bwrap
        other = bench.caller.ref("sandbox/j/1")
        with pytest.raises(Refused, match=r"needs bwrap \+ seccomp.*this host has .*bubblewrap"):
            await other.call(Sandbox.load_job, make_jailed_job(bench), deadline_s=scaled(60))
        trusted_job = LoadJob("j", str(bench.directory), {"calculate": "calc:tool"})
        assert (await other.call(Sandbox.load_job, trusted_job)).isolation_tier == ""


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


async def wait_for_sleep(sandbox: int) -> None:
    """Wait until a cell of `SLEEPS` runs in the sandbox process with this pid."""
    async with asyncio.timeout(scaled(60)):
        while "sleep" not in list_descendant_programs(sandbox):
            await asyncio.sleep(0.01)


async def wait_for_slow_call(bench: SandboxBench, sandbox: int) -> None:
    """Wait until a call of `slow` runs in the sandbox process with this pid."""
    async with asyncio.timeout(scaled(60)):
        while not list(bench.directory.glob(f"begun-{sandbox}-*")):
            await asyncio.sleep(0.01)


def make_job_data(bench: SandboxBench, job: str = "j", **environment: Any) -> JobData:
    tools = {"slow": "calc:slow", "calculate": "calc:tool", "notebook": "python_session"}
    config = JobConfig.from_document(
        {
            "environment": {"tools": tools, **environment},
            "reward": {"use": "calc:reward"},
        }
    )
    bundle = bench.directory / "bundle"
    (bundle / "modules").mkdir(parents=True, exist_ok=True)
    (bundle / "modules" / "calc.py").write_text(MODULE)
    return JobData(job, config, bundle, bench.directory)


async def wait_until_alive(bench: SandboxBench, *names: str) -> None:
    async with asyncio.timeout(scaled(60)):
        while {e.name for e in await registry.list_entries(bench.caller.state) if e.alive} < set(
            names
        ):
            await asyncio.sleep(0.05)


@pytest.mark.rotating(3)
async def test_calls_are_spread_over_sandboxes_and_retried_after_a_death(
    bench: SandboxBench,
) -> None:
    await bench.open()
    second = bench.spawn_sandbox("sandbox/j/1")
    await wait_until_alive(bench, "sandbox/j/0", "sandbox/j/1")
    client = SandboxClient(bench.caller, make_job_data(bench))
    await client.load_job()
    calls = []
    for _ in range(4):  # in separate batches
        calls.append(asyncio.create_task(client.call_tool("slow", str(bench.directory))))
        await asyncio.sleep(0.1)
    await wait_for_slow_call(bench, bench.sandbox.pid)
    await wait_for_slow_call(bench, second.pid)
    second.kill()
    await second.wait(scaled(5))
    await bench.evict("sandbox/j/1")
    (bench.directory / "go").touch()
    pids = await asyncio.gather(*calls)
    assert set(pids) == {bench.sandbox.pid}
    assert await client.call_tool("calculate", "6*7") == "42"
    assert await client.compute_reward({}, [{}, {}]) == 2.0
    await client.close()


@pytest.mark.rotating(3)
async def test_job_that_blocks_its_sandbox_does_not_delay_another(bench: SandboxBench) -> None:
    sandbox = await bench.open()
    bench.spawn_sandbox("sandbox/k/0")
    await wait_until_alive(bench, "sandbox/j/0", "sandbox/k/0")
    with pytest.raises(Refused, match="the sandbox serves job j, not k"):
        await sandbox.call(Sandbox.load_job, LoadJob("k", str(bench.directory), {}))
    busy_client, other_client = (
        SandboxClient(bench.caller, make_job_data(bench, job)) for job in "jk"
    )
    await busy_client.load_job()
    await other_client.load_job()
    hanging_calls = [
        asyncio.create_task(busy_client.call_tool("slow", str(bench.directory))) for _ in range(40)
    ]
    await wait_for_slow_call(bench, bench.sandbox.pid)
    async with asyncio.timeout(scaled(5)):
        assert await other_client.call_tool("calculate", "6*7") == "42"
        assert await other_client.compute_reward({}, [{}]) == 1.0
    assert not any(task.done() for task in hanging_calls)
    (bench.directory / "go").touch()
    assert set(await asyncio.gather(*hanging_calls)) == {bench.sandbox.pid}
    for client in (busy_client, other_client):
        await client.close()


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
async def test_calls_that_must_not_repeat_are_reported_as_crashed(bench: SandboxBench) -> None:
    await bench.open()
    client = SandboxClient(bench.caller, make_job_data(bench, once=["slow"]))
    await client.load_job()
    assert await client.call_tool("notebook", "x = 4\nx", "t1") == {"status": "ok", "output": "4\n"}
    once_call = asyncio.create_task(client.call_tool("slow", str(bench.directory)))
    cell_call = asyncio.create_task(client.call_tool("notebook", SLEEPS, "t1"))
    await wait_for_slow_call(bench, bench.sandbox.pid)
    await wait_for_sleep(bench.sandbox.pid)
    bench.sandbox.kill()
    await bench.sandbox.wait(scaled(5))
    await bench.evict("sandbox/j/0")
    bench.start()
    for answer in await asyncio.gather(once_call, cell_call):
        assert answer["status"] == "crashed" and "was lost" in answer["output"]
    previous_calls = [("notebook", "", answer)]
    after = await client.call_tool("notebook", "'x' in globals()", "t1", previous_calls)
    assert after == {"status": "ok", "output": "False\n"}
    session_calls = [("notebook", "x = 1", {"status": "ok", "output": ""})]
    lost = await client.call_tool("notebook", "x", "t2", session_calls)
    assert lost["status"] == "crashed" and "its process was lost" in lost["output"]
    client.end_session("t1")
    await client.close()


REQUEST = LoadJob("j", "/runs/j/bundle/modules", {}, bundle="d1")
OTHER_REQUESTS = {
    "other modules": replace(REQUEST, bundle_dir="/tmp/mine"),
    "another bundle": replace(REQUEST, bundle="d2"),
    "a tool": replace(REQUEST, tools={"run": "os:system"}),
    "a reward": replace(REQUEST, rewards=[RewardPart("os:system")]),
    "a server": replace(REQUEST, mcp={"files": ["sh", "-c", "true"]}),
    "another interpreter": replace(REQUEST, jail=JailSettings(python="/tmp/python")),
    "a runner": replace(REQUEST, jail=JailSettings(runner=["sh"])),
    "a weaker jail": replace(REQUEST, jail=JailSettings(min_tier="none")),
}


@pytest.mark.parametrize("what", OTHER_REQUESTS)
async def test_load_request_that_differs_from_the_document_is_rejected(what: str) -> None:
    actor = SandboxActor(
        SystemHost(),
        SystemClock(),
        None,
        PoolLimits(),
        SandboxIdentity("sandbox/j/0", "j", compute_request_digest(REQUEST)),
    )
    with pytest.raises(Refused, match="does not match the job's document"):
        await actor.load_job(OTHER_REQUESTS[what])
    assert (await actor.load_job(REQUEST)).job == "j"
    with pytest.raises(Refused, match="does not match the job's document"):
        await actor.load_job(OTHER_REQUESTS[what])
    await actor.stop()


def test_equal_requests_have_the_same_digest() -> None:
    request = replace(REQUEST, rewards=[RewardPart("exact", 1, {"b": 1, "a": [0.5, None]})])
    reordered = replace(REQUEST, rewards=[RewardPart("exact", 1.0, {"a": [0.5, None], "b": 1})])
    assert (
        compute_request_digest(request)
        == compute_request_digest(reordered)
        != compute_request_digest(REQUEST)
    )


def count_exits(recorded: list[Event]) -> list[tuple[str, int]]:
    """Return name and count of the exits that a run counts."""
    return [(e.fields["name"], e.fields["count"]) for e in recorded if is_unexpected_exit(e)]


@story_on(run_virtual, given=2)
async def test_exits_of_one_name_are_batched_into_one_event(
    clock: VirtualClock, random: Random
) -> None:
    mesh = alone("sandbox/calc/0", clock, random, SimulatedHost(clock, random))
    exit_reporter = RedisExitReporter(mesh.state, clock, "sandbox/calc/0", "calc")
    exit_reporter.record_exit("worker of calc", -11, "the process ended by SIGSEGV", None, "calc")
    await clock.sleep(0.1)
    for _ in range(40):
        exit_reporter.record_exit(
            "worker of calc", -11, "the process ended by SIGSEGV", None, "calc"
        )
    exit_reporter.record_exit(
        "zygote", -9, "the zygote was killed: it has been stopped by a signal (pid 7)", None
    )
    await clock.sleep(2 * REPORT_INTERVAL_S)
    recorded = await events.read_all(mesh.state)
    name = "worker of calc of sandbox/calc/0"
    assert count_exits(recorded) == [(name, 1), (name, 40), ("zygote of sandbox/calc/0", 1)]
    assert recorded[1].fields["times"] == 41 and recorded[1].fields["job"] == "calc"
    assert all(JobEventFilter("calc").accept(event) for event in recorded)
    assert not any(JobEventFilter("other").accept(event) for event in recorded)
    exit_reporter.stop()


async def test_only_killed_workers_are_reported(tmp_path: Path) -> None:
    class RecordingReporter(ExitReporter):
        def record_exit(
            self, name: str, code: int, why: str, log: Path | None, job: str = ""
        ) -> None:
            exits.append((name, code, why))

    exits: list[tuple[str, int, str]] = []
    (tmp_path / "tools.py").write_text("import os\ndef pid(x): return os.getpid()\n")
    pool = WorkerPool(
        SystemHost(),
        SystemClock(),
        PoolFunctions("calc", str(tmp_path), {"tool:pid": "tools:pid"}),
        PoolLimits(warm_workers=1, max_workers=1, max_calls_per_worker=2),
        exit_reporter=RecordingReporter(),
    )
    await pool.start()
    try:
        outcomes = [
            (await pool.run([PoolCall("tool:pid", [0], scaled(20.0))]))[0] for _ in range(3)
        ]
        assert {answer.status for answer in outcomes} == {OK}
        assert outcomes[1].value != outcomes[2].value and exits == [], "it has served its time"
        os.kill(outcomes[2].value, signal.SIGKILL)
        (answer,) = await pool.run([PoolCall("tool:pid", [0], scaled(20.0))])
        assert answer.status == OK and answer.value != outcomes[2].value
        ((name, code, _),) = exits
        assert (name, code) == ("worker of calc", -signal.SIGKILL)
    finally:
        await pool.stop()
