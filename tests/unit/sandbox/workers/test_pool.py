"""Whatever a job's code does, its call has a typed outcome and the pool serves the next one."""

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
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    pools: list[WorkerPool] = []
    (tmp_path / "behaviours.py").write_text(textwrap.dedent(BEHAVIOURS))

    async def build(
        reward: str = "behaviours:reward",
        tool: str = "behaviours:tool",
        waits: WaitTable | None = None,
        **limits: Any,
    ) -> WorkerPool:
        references = {f"{TOOL}t": tool, f"{REWARD}0": reward}
        where = PoolFunctions("j", str(tmp_path), references), PoolLimits(**limits)
        log = tmp_path / "sandbox.log"
        pools.append(WorkerPool(SystemHost(), SystemClock(), *where, log, waits))
        await pools[-1].start()
        return pools[-1]

    yield build
    for pool in pools:
        await pool.stop()


HANGING = {"spins", "spins_holding_the_gil", "sleeps"}


def score(do: str, deadline_s: float = 0.0, **row: Any) -> PoolCall:
    """Return a call with a deadline that is short if it hangs, and else far."""
    arguments = [{"do": do, **row}, [{"role": "model", "text": "4"}]]
    deadline_s = deadline_s or (0.3 if do in HANGING else scaled(5.0))
    return PoolCall(f"{REWARD}0", arguments, deadline_s)


def use(
    deadline_s: float, do: str, *, name: str = "t", once: bool = False, **value: Any
) -> PoolCall:
    return PoolCall(TOOL + name, [{"do": do, **value}], scaled(deadline_s), once)


GOOD = CallResult("ok", 0.5, "")


async def with_neighbours(pool: WorkerPool, do: str, **row: Any) -> CallResult:
    """The outcome of one call amid a batch that loses nothing else; nor does the next batch."""
    good = score("good")
    before, odd, *after = await pool.run([good, score(do, **row), good, good])
    assert [before, *after] == [GOOD] * 3
    assert await pool.run([good]) == [GOOD]
    return odd


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
        ("segfaults", "crashed", "reward failed its process twice: it ended by SIGSEGV"),
        ("forks", "ok", ""),
    ],
)
async def test_what_a_reward_does_is_an_outcome_of_its_own_call_only(
    make: Make, do: str, status: str, error: str
) -> None:
    answer = await with_neighbours(await make(warm_workers=1, max_workers=1), do)
    assert (answer.status, answer.error[: len(error)]) == (status, error)
    assert (answer.value is None) == (status != "ok")


@pytest.mark.rotating(3)
@pytest.mark.parametrize("what", ["nan", "inf", "str", "none", "huge", "complex", "list"])
async def test_a_reward_that_is_no_finite_number_is_a_bad_value(make: Make, what: str) -> None:
    answer = await with_neighbours(await make(warm_workers=1, max_workers=1), "returns", what=what)
    assert answer.status == "bad_value" and answer.value is None
    assert answer.error.startswith("reward returned ") and "finite number" in answer.error


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "what", ["object", "int keys", "big int", "surrogate", "loop", "set", "long"]
)
async def test_a_result_that_no_wire_carries_is_a_bad_value(make: Make, what: str) -> None:
    pool = await make(warm_workers=1, max_workers=1)
    odd, good = await pool.run([use(5.0, "odd_value", what=what), use(5.0, "good", value="4")])
    assert odd.status == "bad_value" and odd.error.startswith("t returned ")
    assert good == CallResult("ok", "4", "")


async def test_a_worker_is_not_told_where_the_settings_of_the_mesh_are(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHRL_SETTINGS", "/run/mesh/settings.json")
    pool = await make(warm_workers=1, max_workers=1)
    (answer,) = await pool.run([score("is_told_where_the_settings_are")])
    assert answer == CallResult("ok", 0.0, "")


async def test_an_integer_reward_and_a_bool_are_floats(make: Make) -> None:
    pool = await make(warm_workers=1)
    answers = await pool.run([score("good", value=1), score("good", value=True)])
    assert [answer.value for answer in answers] == [1.0, 1.0]
    assert all(type(answer.value) is float for answer in answers)


async def test_a_tool_that_eats_all_memory_crashes_and_its_process_is_replaced(make: Make) -> None:
    pool = await make(warm_workers=1, max_workers=1, rlimits={"AS": 300 << 20})
    eats, good = use(10.0, "leaks"), use(10.0, "good")
    answers = await pool.run([good, eats, good])
    assert [answer.status for answer in answers] == ["ok", "crashed", "ok"]
    assert "MemoryError" in answers[1].error
    assert pool.replaced_count == 2


@pytest.mark.rotating(3)
async def test_a_leak_of_earlier_calls_does_not_fail_the_call_at_the_limit(make: Make) -> None:
    pool = await make(warm_workers=1, max_workers=1, rlimits={"AS": 300 << 20})
    answers = await pool.run([use(10.0, "leaks_a_little")] * 12)
    assert [answer.status for answer in answers] == ["ok"] * 12
    assert pool.replaced_count >= 2


@pytest.mark.parametrize("do", ["exits_once", "stops_itself_once"])
async def test_a_call_whose_process_was_killed_is_run_again(make: Make, do: str) -> None:
    pool = await make(warm_workers=1, max_workers=1)
    assert await with_neighbours(pool, do) == CallResult("ok", 0.75, "")
    assert pool.replaced_count == 1


async def test_a_call_that_must_not_run_twice_is_crashed(make: Make, tmp_path: Path) -> None:
    pool = await make(warm_workers=1, max_workers=1)
    crashed, good = await pool.run([use(5.0, "exits_once", once=True), use(5.0, "good")])
    assert crashed.status == "crashed" and "once" in crashed.error
    assert good == GOOD
    assert (await pool.run([use(5.0, "exits_once", once=True)]))[0].value == 0.75


async def test_a_process_that_served_enough_calls_is_replaced_without_loss(make: Make) -> None:
    pool = await make(warm_workers=1, max_workers=1, max_calls_per_worker=10)
    answers = await pool.run([use(5.0, "names_its_process")] * 35)
    assert [a.status for a in answers] == ["ok"] * 35
    assert len({a.value for a in answers}) >= 2


async def test_killing_idle_workers_loses_nothing(make: Make) -> None:
    pool = await make(warm_workers=2, max_workers=2)
    for _ in range(3):
        pids = {a.value for a in await pool.run([use(5.0, "names_its_process")] * 8)}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert await pool.run([score("good")] * 8) == [GOOD] * 8


async def test_a_killed_call_takes_its_subprocesses_along(make: Make, tmp_path: Path) -> None:
    pool = await make(warm_workers=1, max_workers=1)
    assert (await pool.run([use(2.0, "starts_a_daemon")]))[0].status == "timeout"
    daemons = list(map(int, (tmp_path / "flag").read_text().split()))
    async with asyncio.timeout(scaled(4.0)):
        while any(map(read_start_time, daemons)):
            await asyncio.sleep(0.02)
    assert len(daemons) == 2


async def test_long_calls_run_in_parallel_as_the_pool_grows(make: Make, tmp_path: Path) -> None:
    pool = await make(warm_workers=1, max_workers=4)
    first = asyncio.create_task(pool.run([use(60.0, "waits")]))
    await asyncio.sleep(0.1)
    assert await pool.run([score("good")] * 3) == [GOOD] * 3
    assert not first.done() and pool.size == 2
    (tmp_path / "flag").touch()
    assert await first == [CallResult("ok", 1.0, "")]


async def test_a_caller_that_leaves_takes_its_waiting_calls_along(make: Make) -> None:
    pool = await make(warm_workers=1, max_workers=1)
    gone = asyncio.create_task(pool.run([score("sleeps")] * 5))
    await asyncio.sleep(0.05)
    gone.cancel()
    assert await pool.run([score("good")]) == [GOOD]
    assert pool.replaced_count == 1


async def test_an_unknown_tool_says_which_there_are(make: Make) -> None:
    pool = await make()
    answer = (await pool.run([use(1.0, "good", name="u")]))[0]
    assert answer.status == "raised"
    assert answer.error == "job j has no u; it has reward, t"


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("behaviours:missing", "AttributeError: module 'behaviours' has no attribute 'missing'"),
        ("nowhere:f", "ModuleNotFoundError: No module named 'nowhere'"),
        ("behaviours:FLAG", "is a str, not a function"),
    ],
)
async def test_unloadable_code_fails_with_its_reason(make: Make, reference: str, says: str) -> None:
    with pytest.raises(ToolFailed, match=says):
        await make(reward=reference)


@pytest.mark.parametrize(("ends", "tries"), [(2, 3), (9, 3)])
async def test_a_worker_that_a_signal_ends_while_it_loads_is_started_again(
    make: Make, tmp_path: Path, ends: int, tries: int
) -> None:
    begun = tmp_path / "begun"
    code = f"""
        import os, signal
        with open({str(begun)!r}, "a+") as file:
            file.write("x")
            file.seek(0)
            begun = len(file.read())
        if begun <= {ends}:
            os.kill(os.getpid(), signal.SIGKILL)

        def reward(row, turns):
            return 0.5
    """
    (tmp_path / "killed.py").write_text(textwrap.dedent(code))
    if ends < tries:
        pool = await make(reward="killed:reward", warm_workers=1, max_workers=1)
        assert await pool.run([score("good")]) == [GOOD]
    else:
        with pytest.raises(ToolFailed, match="ended the process"):
            await make(reward="killed:reward", warm_workers=1, max_workers=1)
    assert len(begun.read_text()) == tries


async def test_a_reader_of_model_texts_has_no_files_programs_or_network(tmp_path: Path) -> None:
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
    where = SystemHost(), SystemClock(), functions, PoolLimits(warm_workers=1)
    pool = WorkerPool(*where, tmp_path / "log")
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


async def test_a_batch_that_hangs_ends_in_two_deadlines_and_names_the_function(make: Make) -> None:
    pool = await make(warm_workers=2, max_workers=2)
    calls = [score("sleeps", deadline_s=1.0)] * 40
    answers = await pool.run(calls, postpone_slow=True)
    late = [answer for answer in answers if answer.status == "timeout"]
    assert 1 <= len(late) <= 4, "not forty deadlines"
    assert extract_location(late[0].error).startswith("behaviours.py:")
    assert extract_location(late[0].error).endswith("in reward()")
    assert {answer.status for answer in answers} == {"timeout", "postponed"}


async def test_calls_that_nobody_has_begun_come_back_while_slow_ones_go_on(make: Make) -> None:
    pool = await make(warm_workers=1, max_workers=1)
    slow = asyncio.create_task(pool.run([score("sleeps", deadline_s=600.0)]))
    await asyncio.sleep(0.1)
    (answer,) = await pool.run([score("good", deadline_s=0.2)], postpone_slow=True)
    assert answer.status == "postponed"
    slow.cancel()


async def test_a_function_that_takes_long_is_named_while_it_runs(make: Make) -> None:
    waits = WaitTable(SystemClock())
    pool = await make(waits=waits, warm_workers=1, max_workers=1)
    running = asyncio.create_task(pool.run([score("sleeps", min(5.0, scaled(1.0)))]))
    while not running.done() and not waits.list_longest([]):
        await asyncio.sleep(0.02)
    (wait,) = waits.list_longest([])
    assert re.fullmatch(r"reward of j, behaviours\.py:\d+ .*\(pid \d+\)", wait["on"]), wait
    await running
    assert waits.list_longest([]) == []


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def _loop() -> Any:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "given",
    [2**70, "\ud800", object(), {1: 2}, {(1,): 2}, _loop(), _deep(3000), "x" * MAX_FRAME_BYTES],
    ids=["large", "surrogate", "object", "int key", "tuple key", "loop", "deep", "long"],
)
async def test_arguments_that_no_wire_carries_fail_their_call_alone(make: Make, given: Any) -> None:
    pool = await make(warm_workers=1, max_workers=1)
    async with asyncio.timeout(scaled(30)):
        odd = await with_neighbours(pool, "good", given=given)
    assert (odd.status, odd.value) == ("bad_value", None)
    assert "reward was given" in odd.error
    assert pool.replaced_count == 0


@pytest.mark.rotating(3)
async def test_calls_that_no_frame_holds_together_are_all_answered(make: Make) -> None:
    pool = await make(warm_workers=1, max_workers=1)
    long = "x" * (MAX_FRAME_BYTES // 3)
    assert await pool.run([score("good", scaled(30.0), given=long)] * 5) == [GOOD] * 5
    assert pool.replaced_count == 0
