"""Records of operations: they outlast every retry, and are let go of when their caller has its
answer.
"""

from __future__ import annotations

import inspect

from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.state import groups
from tests.contract.state.state_bench import JOB, SHARD, Bench, Seats

LET_GO_MS = 121_000


async def admitted(seats: Seats, operation: str, want: int = 1) -> list[int]:
    opened = await groups.admit(seats.state, JOB, SHARD, seats.shard, want, operation)
    return [one.group for one in opened]


async def known(bench: Bench, *operations: str) -> list[str]:
    found = [
        (name, await bench.state.command("EXISTS", f"{{{JOB}}}:op:admit:{name}"))
        for name in operations
    ]
    return [name for name, there in found if there]


async def test_an_operation_is_let_go_of_once_its_caller_has_the_answer(simulated: Bench) -> None:
    seats = await simulated.training_job()
    for operation in ("one", "two", "three"):
        await admitted(seats, operation)
    await simulated.pass_ms(60_000)
    assert await known(simulated, "one", "two", "three") == ["one", "two", "three"]
    await simulated.pass_ms(LET_GO_MS)  # whether the answer of the last has come nobody was told
    assert await known(simulated, "one", "two", "three") == ["three"]


async def test_an_operation_is_known_for_longer_than_anybody_tries_it_again(
    simulated: Bench,
) -> None:
    """Its reply was lost, and Redis away for as long as a caller has patience."""
    patience_s = inspect.signature(patiently).parameters["for_s"].default
    seats = await simulated.training_job()
    first = await admitted(seats, "one", 2)
    await simulated.pass_ms(round(1000 * patience_s) + 60_000)
    assert await admitted(seats, "one", 2) == first


async def test_what_real_servers_let_go_of_is_the_same(bench: Bench) -> None:
    seats = await bench.training_job()
    for operation in ("one", "two"):
        await admitted(seats, operation)
    script = "return redis.call('PEXPIRE', KEYS[1], 7200000)"
    left = [
        await bench.state.command("EVAL", script, 1, f"{{{JOB}}}:op:admit:{name}")
        for name in ("one", "two", "none")
    ]
    assert left == [1, 1, 0]
