"""Benchmark of a session that moves to another engine process, by three methods.

Usage:

    python -m loadtests.moves [--tokens 2048 8192] [--rounds 7]

Two engines of a random model with 64 KiB of cache a token, over sockets. Each round computes a
context at the source, and then runs the next turn at the target in three ways, in rotating order:
`both_s` is a turn whose move begins with it, `move_s` a move and then the turn, `compute_s` a turn
of which nothing comes. `ratio_better` is both over the better one. `ping_*` are calls to the
target, answered by its loop alone, while nothing moves and while the largest context does.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import uvloop

from loadtests.measuring.entry import options, report
from loadtests.measuring.meshed import FOREVER_S, knows, unrenewed
from loadtests.measuring.models import serve as serving
from loadtests.measuring.models import submission
from loadtests.measuring.processes import served
from loadtests.measuring.rounds import rotated
from loadtests.measuring.shapes import drawn, shape
from meshrl.common.api.engine import AttachStream, CacheMove, CacheMoveResult, Engine
from meshrl.common.generation.builtin.engine_builder import build_engine
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.engine.kv import cache_moves as cache_moves

SOURCE, TARGET, SHARD = "engine/source", "engine/target", "rollout/job/0"
SLOTS, LENGTH = 4, 8448
ATTACH_S = 30.0
PING_S = 0.002  # between two pings
MODEL = shape(256, 16, 512, 512, (8, 8), head_dim=64, max_positions=LENGTH)


async def serve(name: str, source: list[str]) -> None:
    mesh = unrenewed(name)
    cache_moves.MAX_UNREAD_BYTES = LENGTH * 65536  # what is moved before its turn lies there whole
    engine = build_engine(MODEL, SLOTS, LENGTH, kv_cache_tokens=LENGTH + 512)
    service = await serving(mesh, engine)
    if source:
        await knows(mesh, SOURCE, *source)
    await service.weights.update_weights(drawn(MODEL), 0, "manifest")
    print(mesh.transport.address, mesh.incarnation, flush=True)
    await asyncio.sleep(FOREVER_S)


class Shard:
    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._turns = 0
        self._over: dict[int, asyncio.Future[None]] = {}
        self.attached = {name: asyncio.Event() for name in (SOURCE, TARGET)}
        self._listeners = [asyncio.create_task(self._listen(name)) for name in (SOURCE, TARGET)]

    async def _listen(self, name: str) -> None:
        attach = AttachStream(SHARD, self.mesh.incarnation)
        async for flush in self.mesh.ref(name).stream(Engine.attach, attach):
            self.attached[name].set()  # the first flush comes at once, and is empty
            for request, finish in zip(
                flush.request_ids.tolist(), flush.finish_reasons.tolist(), strict=True
            ):
                if finish:
                    self._over[request].set_result(None)

    async def submit(self, name: str, session: int, context: list[int], ended: list[int]) -> None:
        """Submit a turn of one token; no turn for an empty context."""
        n = int(bool(context))
        self._turns += n
        sessions, prompts, ids = [session] * n, [context] * n, [self._turns] * n
        request = submission(self.mesh, prompts, ids, 1, sessions=sessions, ended=ended)
        if n:
            self._over[self._turns] = asyncio.get_running_loop().create_future()
        await self.mesh.ref(name).call(Engine.submit, request)

    async def turn(self, name: str, session: int, context: list[int]) -> float:
        began = time.perf_counter()
        await self.submit(name, session, context, [])
        await self._over[self._turns]
        return time.perf_counter() - began

    async def move(self, session: int) -> CacheMoveResult:
        return await self.mesh.ref(TARGET).call(
            Engine.move_cache, CacheMove(SHARD, session, SOURCE)
        )

    async def pings(self, until: asyncio.Future[Any]) -> list[float]:
        took = []
        while not until.done():
            began = time.perf_counter()
            await self.submit(TARGET, -1, [], [])
            took.append(1e3 * (time.perf_counter() - began))
            await asyncio.sleep(PING_S)
        return took

    def close(self) -> None:
        for task in self._listeners:
            task.cancel()


async def measure(shard: Shard, counts: list[int], rounds: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    figures: dict[str, list[float]] = {}
    session = 0
    for turn in range(rounds):
        for count in counts:
            for arm in rotated(("both", "move", "compute"), turn):
                session += 1
                context = random.integers(0, MODEL.vocab_size, count).tolist()
                if arm != "compute":
                    await shard.turn(SOURCE, session, context)
                found = await _arm(shard, arm, session, [*context, 1, 2], count == max(counts))
                for name, value in found.items():
                    kept = figures.setdefault(name if "pings" in name else f"{name}_{count}", [])
                    kept.extend(value)
                await shard.submit(SOURCE, -1, [], [session])
        idle = asyncio.ensure_future(asyncio.sleep(0.5))
        figures.setdefault("pings_idle", []).extend(await shard.pings(idle))
    return _report(figures, counts)


async def _arm(
    shard: Shard, arm: str, session: int, context: list[int], listens: bool
) -> dict[str, list[float]]:
    """Continue at the target by one method, for a context that it has never computed."""
    began, found = time.perf_counter(), {}
    later = asyncio.ensure_future(_continue_session(shard, arm, session, context))
    if listens and arm == "both":
        found["pings_moving"] = await shard.pings(later)
    await later
    found[f"{arm}_s"] = [time.perf_counter() - began]
    await shard.submit(TARGET, -1, [], [session])
    return found


async def _continue_session(shard: Shard, arm: str, session: int, context: list[int]) -> None:
    if arm == "move":
        moved = await shard.move(session)
        assert moved.is_complete, moved
    elif arm == "both":
        moving = asyncio.ensure_future(shard.move(session))
        await asyncio.sleep(0)  # as a shard's stay does
    await shard.turn(TARGET, session, context)
    if arm == "both":
        await moving


def _report(figures: dict[str, list[float]], counts: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, values in figures.items():
        if name.startswith("pings"):
            kind = name.removeprefix("pings_")
            found[f"ping_{kind}_p99_ms"] = round(float(np.quantile(values, 0.99)), 2)
        else:
            found[name] = round(statistics.median(values), 4)
    for count in counts:
        both, move, compute = (figures[f"{arm}_s_{count}"] for arm in ("both", "move", "compute"))
        better = [b / min(m, c) for b, m, c in zip(both, move, compute, strict=True)]
        found[f"ratio_better_{count}"] = round(statistics.median(better), 3)
    return found


@contextmanager
def started(name: str, *source: str) -> Iterator[list[str]]:
    with served("loadtests.moves", "--serve", name, "--source", *source) as (_, line):
        yield line.split()


async def compare(counts: list[int], rounds: int) -> dict[str, Any]:
    with started(SOURCE) as told, started(TARGET, *told) as heard:
        mesh = unrenewed(SHARD)
        mesh.start()
        await knows(mesh, SOURCE, *told)
        await knows(mesh, TARGET, *heard)
        shard = Shard(mesh)
        try:
            for event in shard.attached.values():
                await asyncio.wait_for(event.wait(), ATTACH_S)
            figures = await measure(shard, counts, rounds)
        finally:
            shard.close()
            await mesh.leave()
    return figures


def main() -> None:
    parser = options(__doc__, tokens=[2048, 8192], rounds=7)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--source", nargs="*", default=[], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        uvloop.run(serve(chosen.serve, chosen.source))
    else:
        report(uvloop.run(compare(chosen.tokens, chosen.rounds)))


if __name__ == "__main__":
    main()
