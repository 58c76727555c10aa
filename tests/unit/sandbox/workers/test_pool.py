"""Worker pool: typed outcomes for any behaviour of a job's code, and calls after it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ToolFailed
from meshrl.common.job.bundle.source_locations import extract_location
from meshrl.common.mesh.process.child_handle import read_start_time
from meshrl.common.mesh.process.entry.child import MAX_FRAME_BYTES
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.calls.waits import WaitTable
from meshrl.services.sandbox.jail.confinement import landlock
from meshrl.services.sandbox.outcomes import CallResult
from meshrl.services.sandbox.workers.calls import PoolCall, PoolFunctions, PoolLimits
from meshrl.services.sandbox.workers.pool import WorkerPool
from meshrl.services.sandbox.workers.worker import REWARD, TOOL
from tests.load import scaled

BEHAVIOURS = """
    import os, re, sys, time, threading

    LEAKED = []
    FLAG = os.path.join(os.path.dirname(__file__), "flag")

    def reward(row, turns):
        return BEHAVIOURS[row["do"]](row)

    def tool(value):
        return BEHAVIOURS[value["do"]](value)

    def good(row):
        return row.get("value", 0.5)

    def is_told_where_the_settings_are(row):
        return bool(os.environ.get("MESHRL_SETTINGS"))

    def raises(row):
        raise KeyError("answer")

    def raises_what_no_wire_carries(row):
        raise ValueError("\\ud800")

    def raises_oddly(row):
        class Odd(Exception):
            def __str__(self):
                raise ValueError("no text")
        raise Odd()

    def spins(row):
        while True:
            pass

    def spins_holding_the_gil(row):
        re.match(r"(a+)+$", "a" * 60 + "b")

    def sleeps(row):
        time.sleep(600)

    def waits(row):
        while not os.path.exists(FLAG):
            time.sleep(0.01)
        return 1.0

    def prints(row):
        print("\\x00\\xff garbage " * 1000)
        print("and more", file=sys.stderr)
        sys.stdout.buffer.write(bytes(range(256)))
        return 1.0

    def writes_to_descriptors(row):
        for fd in range(0, 60):
            try:
                os.write(fd, b"\\xff" * 100)
            except OSError:
                pass
        return 1.0

    def closes_descriptors(row):
        os.closerange(0, 250)
        return 1.0

    def returns(row):
        return {
            "nan": float("nan"), "inf": -float("inf"), "str": "1.0", "none": None, "huge": 10**400,
            "complex": 1j, "list": [1.0],
        }[row["what"]]

    def odd_value(row):
        loop = []
        loop.append(loop)
        return {
            "object": object(), "int keys": {1: 2}, "big int": 2**70, "surrogate": "\\ud800",
            "loop": loop, "set": {1}, "long": "x" * (2 << 20),
        }[row["what"]]

    def exits(row):
        os._exit(0)

    def exits_politely(row):
        sys.exit("done")

    def segfaults(row):
        import ctypes
        ctypes.string_at(0)

    def forks(row):
        if os.fork() == 0:
            return 2.0
        return 1.0

    def leaks(row):
        while True:
            LEAKED.append(bytearray(1 << 20))

    def leaks_a_little(row):
        LEAKED.append(bytearray(60 << 20))
        return 1.0

    def exits_once(row):
        if not os.path.exists(FLAG):
            open(FLAG, "w").close()
            os._exit(1)
        return 0.75

    def names_its_process(row):
        return os.getpid()

    def stops_itself_once(row):
        if not os.path.exists(FLAG):
            open(FLAG, "w").close()
            os.kill(os.getpid(), 19)
        return 0.75

    def starts_a_daemon(row):
        import subprocess
        daemon = subprocess.Popen(["sleep", "600"])
        left = ["env", "-i", "setsid", "sh", "-c", "/bin/sleep 600 > /dev/null & echo $!"]
        other = subprocess.check_output(left, text=True)
        open(FLAG, "w").write(f"{daemon.pid} {other}")
        time.sleep(600)

    BEHAVIOURS = dict(globals())
"""

Make = Callable[..., Awaitable[WorkerPool]]


@pytest.fixture
async def make_pool(tmp_path: Path) -> AsyncIterator[Make]:
    pools: list[WorkerPool] = []
    (tmp_path / "behaviours.py").write_text(textwrap.dedent(BEHAVIOURS))

    async def start_pool(
        reward: str = "behaviours:reward",
        tool: str = "behaviours:tool",
        wait_table: WaitTable | None = None,
        **limits: Any,
    ) -> WorkerPool:
        references = {f"{TOOL}t": tool, f"{REWARD}0": reward}
        arguments = PoolFunctions("j", str(tmp_path), references), PoolLimits(**limits)
        log = tmp_path / "sandbox.log"
        pools.append(WorkerPool(SystemHost(), SystemClock(), *arguments, log, wait_table))
        await pools[-1].start()
        return pools[-1]

    yield start_pool
    for pool in pools:
        await pool.stop()


HANGING = {"spins", "spins_holding_the_gil", "sleeps"}


def make_reward_call(do: str, deadline_s: float = 0.0, **row: Any) -> PoolCall:
    """Return a call whose deadline is short if it hangs, and long otherwise."""
    arguments = [{"do": do, **row}, [{"role": "model", "text": "4"}]]
    deadline_s = deadline_s or (0.3 if do in HANGING else scaled(5.0))
    return PoolCall(f"{REWARD}0", arguments, deadline_s)


def make_tool_call(
    deadline_s: float, do: str, *, name: str = "t", once: bool = False, **value: Any
) -> PoolCall:
    return PoolCall(TOOL + name, [{"do": do, **value}], scaled(deadline_s), once)


GOOD = CallResult("ok", 0.5, "")


async def run_among_good_calls(pool: WorkerPool, do: str, **row: Any) -> CallResult:
    """Return the outcome of one call in a batch, after checking that no other call is lost."""
    good = make_reward_call("good")
    before, outcome, *after = await pool.run([good, make_reward_call(do, **row), good, good])
    assert [before, *after] == [GOOD] * 3
    assert await pool.run([good]) == [GOOD]
    return outcome


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    ("do", "status", "error"),
    [
        ("raises", "raised", "KeyError: 'answer' (behaviours.py:"),
        ("raises_oddly", "raised", "Odd"),
        ("raises_what_no_wire_carries", "raised", "ValueError: \\ud800"),
        ("spins", "timeout", "reward took more than 0.3 s"),
        ("spins_holding_the_gil", "timeout", "reward took more than 0.3 s"),
        ("sleeps", "timeout", "reward took more than 0.3 s"),
        ("prints", "ok", ""),
        ("writes_to_descriptors", "ok", ""),
        ("closes_descriptors", "crashed", "reward failed its process twice"),
        ("exits", "crashed", "reward failed its process twice: exit status 0"),
        ("exits_politely", "raised", "SystemExit: done"),
        ("segfaults", "crashed", "reward failed its process twice: the process ended by SIGSEGV"),
        ("forks", "ok", ""),
    ],
)
async def test_behaviour_of_a_reward_affects_only_its_own_call(
    make_pool: Make, do: str, status: str, error: str
) -> None:
    answer = await run_among_good_calls(await make_pool(warm_workers=1, max_workers=1), do)
    assert (answer.status, answer.error[: len(error)]) == (status, error)
    assert (answer.value is None) == (status != "ok")


@pytest.mark.rotating(3)
@pytest.mark.parametrize("what", ["nan", "inf", "str", "none", "huge", "complex", "list"])
async def test_reward_that_is_no_finite_number_is_a_bad_value(make_pool: Make, what: str) -> None:
    answer = await run_among_good_calls(
        await make_pool(warm_workers=1, max_workers=1), "returns", what=what
    )
    assert answer.status == "bad_value" and answer.value is None
    assert answer.error.startswith("reward returned ") and "finite number" in answer.error


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "what", ["object", "int keys", "big int", "surrogate", "loop", "set", "long"]
)
async def test_unserializable_result_is_a_bad_value(make_pool: Make, what: str) -> None:
    pool = await make_pool(warm_workers=1, max_workers=1)
    outcome, good = await pool.run(
        [make_tool_call(5.0, "odd_value", what=what), make_tool_call(5.0, "good", value="4")]
    )
    assert outcome.status == "bad_value" and outcome.error.startswith("t returned ")
    assert good == CallResult("ok", "4", "")


async def test_worker_environment_has_no_mesh_settings(
    make_pool: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHRL_SETTINGS", "/run/mesh/settings.json")
    pool = await make_pool(warm_workers=1, max_workers=1)
    (answer,) = await pool.run([make_reward_call("is_told_where_the_settings_are")])
    assert answer == CallResult("ok", 0.0, "")


async def test_integer_and_bool_rewards_become_floats(make_pool: Make) -> None:
    pool = await make_pool(warm_workers=1)
    answers = await pool.run(
        [make_reward_call("good", value=1), make_reward_call("good", value=True)]
    )
    assert [answer.value for answer in answers] == [1.0, 1.0]
    assert all(type(answer.value) is float for answer in answers)


async def test_tool_that_exhausts_memory_crashes_and_its_process_is_replaced(
    make_pool: Make,
) -> None:
    pool = await make_pool(warm_workers=1, max_workers=1, rlimits={"AS": 300 << 20})
    memory_call, good = make_tool_call(10.0, "leaks"), make_tool_call(10.0, "good")
    answers = await pool.run([good, memory_call, good])
    assert [answer.status for answer in answers] == ["ok", "crashed", "ok"]
    assert "MemoryError" in answers[1].error
    assert pool.replaced_count == 2


@pytest.mark.rotating(3)
async def test_leaks_of_earlier_calls_do_not_fail_later_calls(make_pool: Make) -> None:
    pool = await make_pool(warm_workers=1, max_workers=1, rlimits={"AS": 300 << 20})
    answers = await pool.run([make_tool_call(10.0, "leaks_a_little")] * 12)
    assert [answer.status for answer in answers] == ["ok"] * 12
    assert pool.replaced_count >= 2


@pytest.mark.parametrize("do", ["exits_once", "stops_itself_once"])
async def test_call_is_repeated_after_its_process_was_killed(make_pool: Make, do: str) -> None:
    pool = await make_pool(warm_workers=1, max_workers=1)
    assert await run_among_good_calls(pool, do) == CallResult("ok", 0.75, "")
    assert pool.replaced_count == 1


async def test_call_that_must_not_repeat_is_reported_as_crashed(
    make_pool: Make, tmp_path: Path
) -> None:
    pool = await make_pool(warm_workers=1, max_workers=1)
    crashed, good = await pool.run(
        [make_tool_call(5.0, "exits_once", once=True), make_tool_call(5.0, "good")]
    )
    assert crashed.status == "crashed" and "once" in crashed.error
    assert good == GOOD
    assert (await pool.run([make_tool_call(5.0, "exits_once", once=True)]))[0].value == 0.75


async def test_worker_is_replaced_after_its_call_limit_without_loss(make_pool: Make) -> None:
    pool = await make_pool(warm_workers=1, max_workers=1, max_calls_per_worker=10)
    answers = await pool.run([make_tool_call(5.0, "names_its_process")] * 35)
    assert [a.status for a in answers] == ["ok"] * 35
    assert len({a.value for a in answers}) >= 2


async def test_killed_idle_workers_lose_no_call(make_pool: Make) -> None:
    pool = await make_pool(warm_workers=2, max_workers=2)
    for _ in range(3):
        pids = {a.value for a in await pool.run([make_tool_call(5.0, "names_its_process")] * 8)}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert await pool.run([make_reward_call("good")] * 8) == [GOOD] * 8


async def test_subprocesses_of_a_killed_call_are_killed(make_pool: Make, tmp_path: Path) -> None:
    pool = await make_pool(warm_workers=1, max_workers=1)
    assert (await pool.run([make_tool_call(2.0, "starts_a_daemon")]))[0].status == "timeout"
    daemons = list(map(int, (tmp_path / "flag").read_text().split()))
    async with asyncio.timeout(scaled(4.0)):
        while any(map(read_start_time, daemons)):
            await asyncio.sleep(0.02)
    assert len(daemons) == 2


async def test_long_calls_run_in_parallel_as_the_pool_grows(
    make_pool: Make, tmp_path: Path
) -> None:
    pool = await make_pool(warm_workers=1, max_workers=4)
    first = asyncio.create_task(pool.run([make_tool_call(60.0, "waits")]))
    await asyncio.sleep(0.1)
    assert await pool.run([make_reward_call("good")] * 3) == [GOOD] * 3
    assert not first.done() and pool.size == 2
    (tmp_path / "flag").touch()
    assert await first == [CallResult("ok", 1.0, "")]


async def test_waiting_calls_of_a_cancelled_caller_are_cancelled(make_pool: Make) -> None:
    pool = await make_pool(warm_workers=1, max_workers=1)
    cancelled = asyncio.create_task(pool.run([make_reward_call("sleeps")] * 5))
    await asyncio.sleep(0.05)
    cancelled.cancel()
    assert await pool.run([make_reward_call("good")]) == [GOOD]
    assert pool.replaced_count == 1


async def test_unknown_tool_error_lists_the_known_ones(make_pool: Make) -> None:
    pool = await make_pool()
    answer = (await pool.run([make_tool_call(1.0, "good", name="u")]))[0]
    assert answer.status == "raised"
    assert answer.error == "job j has no u; it has reward, t"


@pytest.mark.parametrize(
    ("reference", "error"),
    [
        ("behaviours:missing", "AttributeError: module 'behaviours' has no attribute 'missing'"),
        ("nowhere:f", "ModuleNotFoundError: No module named 'nowhere'"),
        ("behaviours:FLAG", "is a str, not a function"),
    ],
)
async def test_unloadable_code_fails_with_its_reason(
    make_pool: Make, reference: str, error: str
) -> None:
    with pytest.raises(ToolFailed, match=error):
        await make_pool(reward=reference)


@pytest.mark.parametrize(("kill_count", "start_count"), [(2, 3), (9, 3)])
async def test_worker_killed_during_loading_is_restarted(
    make_pool: Make, tmp_path: Path, kill_count: int, start_count: int
) -> None:
    start_log = tmp_path / "begun"
    code = f"""
        import os, signal
        with open({str(start_log)!r}, "a+") as file:
            file.write("x")
            file.seek(0)
            begun = len(file.read())
        if begun <= {kill_count}:
            os.kill(os.getpid(), signal.SIGKILL)

        def reward(row, turns):
            return 0.5
    """
    (tmp_path / "killed.py").write_text(textwrap.dedent(code))
    if kill_count < start_count:
        pool = await make_pool(reward="killed:reward", warm_workers=1, max_workers=1)
        assert await pool.run([make_reward_call("good")]) == [GOOD]
    else:
        with pytest.raises(ToolFailed, match="ended the process"):
            await make_pool(reward="killed:reward", warm_workers=1, max_workers=1)
    assert len(start_log.read_text()) == start_count


async def test_confined_worker_has_no_files_programs_or_network(tmp_path: Path) -> None:
    source = """
        import os, socket, subprocess

        def tool(what):
            return {
                "write": lambda: open("/tmp/planted", "w"),
                "read": lambda: open("/etc/passwd").read(),
                "connect": lambda: socket.socket(),
                "see": lambda: os.listdir("/proc"),
                "think": lambda: 6 * 7,
            }[what]()
    """
    (tmp_path / "closed.py").write_text(textwrap.dedent(source))
    functions = PoolFunctions("j", str(tmp_path), {f"{TOOL}t": "closed:tool"}, is_confined=True)
    environment = SystemHost(), SystemClock(), functions, PoolLimits(warm_workers=1)
    pool = WorkerPool(*environment, tmp_path / "log")
    await pool.start()
    calls = [
        PoolCall(f"{TOOL}t", [what], scaled(5.0))
        for what in ("think", "connect", "write", "read", "see")
    ]
    answers = await pool.run(calls)
    await pool.stop()
    assert answers[0] == CallResult("ok", 42, "")
    assert answers[1].error.startswith("PermissionError")
    if landlock.read_abi() >= landlock.MIN_ABI:
        assert [a.error.partition(":")[0] for a in answers[2:]] == ["PermissionError"] * 3


async def test_hanging_batch_ends_within_two_deadlines_and_names_the_function(
    make_pool: Make,
) -> None:
    pool = await make_pool(warm_workers=2, max_workers=2)
    calls = [make_reward_call("sleeps", deadline_s=1.0)] * 40
    answers = await pool.run(calls, postpone_slow=True)
    timed_out = [answer for answer in answers if answer.status == "timeout"]
    assert 1 <= len(timed_out) <= 4, "not forty deadlines"
    assert extract_location(timed_out[0].error).startswith("behaviours.py:")
    assert extract_location(timed_out[0].error).endswith("in reward()")
    assert {answer.status for answer in answers} == {"timeout", "postponed"}


async def test_unstarted_calls_are_postponed_while_slow_ones_run(make_pool: Make) -> None:
    pool = await make_pool(warm_workers=1, max_workers=1)
    slow_call = asyncio.create_task(pool.run([make_reward_call("sleeps", deadline_s=600.0)]))
    await asyncio.sleep(0.1)
    (answer,) = await pool.run([make_reward_call("good", deadline_s=0.2)], postpone_slow=True)
    assert answer.status == "postponed"
    slow_call.cancel()


async def test_slow_function_is_named_while_it_runs(make_pool: Make) -> None:
    wait_table = WaitTable(SystemClock())
    pool = await make_pool(wait_table=wait_table, warm_workers=1, max_workers=1)
    running = asyncio.create_task(pool.run([make_reward_call("sleeps", min(5.0, scaled(1.0)))]))
    while not running.done() and not wait_table.list_longest([]):
        await asyncio.sleep(0.02)
    (wait,) = wait_table.list_longest([])
    assert re.fullmatch(r"reward of j, behaviours\.py:\d+ .*\(pid \d+\)", wait["on"]), wait
    await running
    assert wait_table.list_longest([]) == []


def _nest(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def _make_loop() -> Any:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "argument",
    [
        2**70,
        "\ud800",
        object(),
        {1: 2},
        {(1,): 2},
        _make_loop(),
        _nest(3000),
        "x" * MAX_FRAME_BYTES,
    ],
    ids=["large", "surrogate", "object", "int key", "tuple key", "loop", "deep", "long"],
)
async def test_unserializable_arguments_fail_only_their_call(
    make_pool: Make, argument: Any
) -> None:
    pool = await make_pool(warm_workers=1, max_workers=1)
    async with asyncio.timeout(scaled(30)):
        outcome = await run_among_good_calls(pool, "good", given=argument)
    assert (outcome.status, outcome.value) == ("bad_value", None)
    assert "the arguments of reward" in outcome.error
    assert pool.replaced_count == 0


@pytest.mark.rotating(3)
async def test_calls_larger_than_a_frame_together_are_answered(make_pool: Make) -> None:
    pool = await make_pool(warm_workers=1, max_workers=1)
    long_text = "x" * (MAX_FRAME_BYTES // 3)
    assert (
        await pool.run([make_reward_call("good", scaled(30.0), given=long_text)] * 5) == [GOOD] * 5
    )
    assert pool.replaced_count == 0
