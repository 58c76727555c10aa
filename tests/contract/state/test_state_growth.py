"""A job of many steps: what Redis holds for it does not depend on how many it has done."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshrl.common.state import events, readers, steps
from meshrl.common.state.redis.client import State
from tests.contract.state.state_bench import JOB, Bench, Seats, Server

RECORDER = readers.recorder_of(JOB)
STEP_MS = 1000
CHECKPOINT_EVERY = 8
TRIM_EVERY = 10  # steps


async def step(seats: Seats, number: int) -> None:
    """One whole step, covered by a checkpoint as in a run."""
    for group in await seats.admit():
        await seats.finish(group)
    covered = (number - 1) // CHECKPOINT_EVERY * CHECKPOINT_EVERY
    await seats.commit(number, await seats.leased(number), covered=covered)


async def recorded(bench: Bench, number: int, keep_ms: int) -> None:
    """The recorder has written all down, and the launcher trims."""
    at = await events.last_id(bench.state)
    await readers.note(bench.state, RECORDER, at, "/runs/job", step=number)
    await readers.trim(bench.state, 0, keep_ms=keep_ms)


async def test_keys_stay_as_many_as_they_were_after_the_first_minutes(simulated: Bench) -> None:
    seats = await simulated.training_job(steps=1_000_000)
    counted = []
    for number in range(1, 551):
        await step(seats, number)
        await simulated.pass_ms(STEP_MS)
        if number % TRIM_EVERY == 0:
            await recorded(simulated, number, readers.KEEP_MS)
        if number in (200, 550):
            counted.append(await simulated.state.command("DBSIZE"))
    early, late = counted
    assert late <= early + CHECKPOINT_EVERY
    # Five operations a step, for the two minutes in which a copy of one may still come.
    assert late < 7 * readers.KEEP_MS // STEP_MS


@pytest.mark.needs("redis-server")
async def test_keys_and_bytes_of_a_real_server_stay_flat(
    servers: Callable[[str], Server],
) -> None:
    state = await State.open(servers("redis-server").url)
    await state.command("FLUSHALL")
    await state.command(
        "CONFIG", "SET", "appendfsync", "no"
    )  # what it holds is asked, not how safe
    bench = Bench(state, None)
    seats = await bench.training_job(steps=1_000_000)
    keys, memory, entries = [], [], []
    for number in range(1, 401):
        await step(seats, number)
        if number % TRIM_EVERY == 0:
            await recorded(bench, number, keep_ms=1)
        if number in (100, 250, 400):
            # Operations go by time, which does not pass here.
            done = "for _, k in ipairs(redis.call('KEYS', '*:op:*')) do redis.call('DEL', k) end"
            await state.command("EVAL", done, 0)
            keys.append(await state.command("DBSIZE"))
            entries.append(await state.command("XLEN", "{mesh}:events"))
            memory.append((await state.command("INFO", "memory"))["used_memory"])
    assert len(await steps.step_rows(state, JOB)) <= 2 * CHECKPOINT_EVERY + TRIM_EVERY
    await state.command("CONFIG", "SET", "appendfsync", "always")
    await state.close()
    assert keys[2] <= keys[0] + CHECKPOINT_EVERY, keys
    assert entries[2] <= entries[0] + 50, entries
    assert memory[2] < 1.05 * memory[0], memory
