"""Logs, stopwatches and watchdogs of processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.base.errors import Refused
from meshrl.common.base.random import Random
from meshrl.common.mesh.runtime.lease import LOST
from meshrl.common.mesh.telemetry import stopwatch
from meshrl.common.mesh.telemetry.stopwatch import UNTIMED, Stopwatch
from meshrl.common.state import registry
from meshrl.sim.loop import VirtualClock, run_virtual
from tests.load import scaled
from tests.unit.common.mesh.runtime.talking import Join, Talker

PROGRAM = """
import asyncio, sys, threading
from meshrl.common.mesh.telemetry.logs import Telemetry, log_to_stderr
from meshrl.common.mesh.telemetry.tracing import adopt

log_to_stderr(*sys.argv[1:])
log = Telemetry(*sys.argv[1:]).log

async def answers(trace):
    adopt(trace)
    await asyncio.sleep(0)
    log.info("answers")

async def main():
    log.info("starts")
    traces = [f"00-{digit * 32}-0123456789abcdef-01" for digit in "ab"]
    await asyncio.gather(*map(answers, traces))
    thread = threading.Thread(target=log.info, args=("on a thread",))
    thread.start()
    thread.join()

asyncio.run(main())
"""
HUNG = """
import asyncio, sys, time
from meshrl.common.base.clock import SystemClock
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.mesh import Mesh, run
from meshrl.common.mesh.runtime.seams import Seams, Terms
from meshrl.common.base.random import Random
from meshrl.sim.redis.state import simulated_state
from meshrl.common.mesh.transport.zmq import ZmqTransport

def stand_still(seconds):
    time.sleep(seconds)

STALL_S = float(sys.argv[1])

async def main():
    clock = SystemClock()
    seams = Seams(simulated_state(clock), ZmqTransport(), clock, Random.system(), SystemHost())
    mesh = Mesh("hung", "test", seams, terms=Terms(renew_s=0.1, stall_s=STALL_S))
    await mesh.join(None)
    with mesh.loading():
        stand_still(1.5 * STALL_S)
    print("loaded", flush=True)
    stand_still(3600)

run(main)
"""


def lines(*whose: str) -> list[dict[str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *whose], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_every_line_says_which_job_its_process_serves_and_the_trace_of_the_call() -> None:
    found = lines("engine/g1.0", "calculator")
    assert {(line["service"], line["job"]) for line in found} == {("engine/g1.0", "calculator")}
    assert [line["event"] for line in found] == ["starts", "answers", "answers", "on a thread"]
    assert [line.get("trace") for line in found] == [None, "a" * 32, "b" * 32, None]


def test_one_that_serves_no_job_names_none() -> None:
    assert not any("job" in line for line in lines("planner/0"))


def parts_of(watch: Stopwatch) -> list[tuple[str, float]]:
    flat = watch.parts()
    return list(zip(flat[::2], flat[1::2], strict=True))  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.001, 5.0)), max_size=20))
def test_states_follow_each_other_and_fill_the_time(course: list[tuple[str, float]]) -> None:
    async def story(clock: VirtualClock, random: Random) -> None:
        watch, began = Stopwatch(clock, "begin"), clock.monotonic()
        for state, seconds in course:
            watch.enter(state)
            await clock.sleep(seconds)
        lasted_ms = 1000 * (clock.monotonic() - began)
        found = parts_of(watch)
        assert sum(ms for _, ms in found) == pytest.approx(lasted_ms, abs=0.001 * len(found) + 1e-6)
        told = [state for state, _ in found]
        entered = [state for state, _ in course]
        assert told == [s for i, s in enumerate(entered) if i == 0 or s != entered[i - 1]]

    run_virtual(story)


def test_what_comes_after_the_last_part_that_is_kept_counts_as_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stopwatch, "MOST", 2)

    async def story(clock: VirtualClock, random: Random) -> None:
        watch = Stopwatch(clock, "a")
        for state in ("b", "c", "d", "e"):
            await clock.sleep(1.0)
            watch.enter(state)
        await clock.sleep(1.0)
        assert parts_of(watch) == [("a", 1000.0), ("b", 1000.0), ("c", 3000.0)]

    run_virtual(story)


def test_what_is_not_traced_can_be_told_all_the_same() -> None:
    UNTIMED.enter("queue")
    assert not hasattr(UNTIMED, "parts")


def test_a_hung_loop_dumps_its_stacks_and_exits() -> None:
    command = [sys.executable, "-c", HUNG, str(min(10.0, scaled(2.0)))]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=scaled(100), check=False
    )
    assert ended.returncode == LOST
    assert ended.stdout == "loaded\n"
    assert "the event loop has not run for" in ended.stderr
    assert "in stand_still" in ended.stderr


async def test_ready_is_published_without_waiting_for_the_renewal(join: Join) -> None:
    mesh = await join("a", Talker(), renew_s=60.0, ttl_s=120.0)
    mesh.ready = True
    await mesh.publish()
    entry = await registry.lookup(mesh.state, "a")
    assert entry is not None and entry.stats["ready"] is True


async def test_a_name_has_one_holder(join: Join) -> None:
    first = await join("a", Talker(), ttl_s=30.0)
    with pytest.raises(Refused):
        await join("a", Talker(), ttl_s=0.1)
    await first.leave()
    second = await join("a", Talker())
    assert second.token > first.token > 0
