"""Engine that follows a job's versions as real engines do, and a shard that reads its tokens.

Usage:

python -m loadtests.weights.members.serving engine engine/g0 JOB MODEL
python -m loadtests.weights.members.serving shard rollout/JOB/0 JOB
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from loadtests.measuring.entry import print_progress
from loadtests.measuring.models import submission
from loadtests.weights import models
from loadtests.weights.members.orders import obey
from meshrl.common.api.engine import AttachStream, Engine, FinishReason, TokenBatch
from meshrl.common.generation.builtin.engine_builder import build_engine
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.services.engine.role_process import SWITCH_INTERVAL_S, ThreadDriver, follow_versions
from meshrl.services.engine.service import FLUSH_S, FLUSH_STEPS, EngineService
from meshrl.services.engine.weights.version_receiver import VersionReceiver

SLOTS, LENGTH = 8, 4096
PROMPT = [1, 2, 3, 4]


class Serving:
    """Engine process, which joins the mesh on an order."""

    def __init__(self, mesh: Mesh, job: str, model: str) -> None:
        self._mesh, self._job, self._model = mesh, job, model
        self._driver = ThreadDriver(asyncio.get_running_loop())
        self._engine = build_engine(
            models.MODELS[model], SLOTS, LENGTH, max_steps=FLUSH_STEPS, step_budget_s=FLUSH_S
        )
        self._service = EngineService(mesh, self._engine, self._driver.call_on_loop)
        self._following: asyncio.Task[None] | None = None

    def stats(self) -> dict[str, Any]:
        return {"version": self._engine.version, "manifest": self._service.weights.manifest}

    async def begin(self, look_s: float = 1.0) -> float:
        """Join and follow the job; return the start by the clock that processes share."""
        at = time.monotonic()
        self._driver.start(self._service)
        await self._mesh.join(self._service, stats=self.stats)
        versions = VersionReceiver(self._mesh, self._job)
        following = follow_versions(self._mesh, self._service, self._job, versions, look_s)
        self._following = asyncio.create_task(following)
        self._following.add_done_callback(self._report_error)
        return at

    def _report_error(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            print_progress(f"following ended: {error!r}")

    def serves(self) -> dict[str, Any]:
        """Return the version in use, -1 if none, and `error`: why it stopped following."""
        ended = self._following is not None and self._following.done()
        error = repr(self._following.exception()) if ended and self._following else ""
        return self.stats() | {"lineage": self._service.weights.lineage, "error": error}

    async def puts(self, seeds: list[int]) -> list[float]:
        """Measure the seconds of installing whole versions from memory between two idle steps."""
        took = []
        for seed in seeds:
            tensors = models.drawn(self._model, seed)
            version = self._engine.version

            def put(tensors: Any = tensors, version: int = version) -> float:
                started_s = time.monotonic()
                self._engine.update_weights(tensors, version)
                return time.monotonic() - started_s

            took.append(
                await self._service.commands.run_between_steps(put, "a version to be put in place")
            )
        return took


@dataclass
class Heard:
    """Record of flushes: times, numbers of tokens, and versions."""

    at: list[float] = field(default_factory=list)
    tokens: int = 0
    versions: list[int] = field(default_factory=list)  # the highest of each flush's tokens


class Shard:
    """Reads one engine's tokens."""

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._mesh, self._owner = mesh, mesh.name
        self._listening: dict[str, asyncio.Task[None]] = {}
        self._attached: dict[str, asyncio.Event] = {}
        self._heard: dict[str, Heard] = {}
        self._last = 0
        self._over: dict[int, asyncio.Future[int]] = {}
        self._said: dict[int, list[tuple[int, float, int]]] = {}
        self._first: asyncio.Future[float] | None = None
        self._wanted = 0

    async def attach(self, engine: str) -> None:
        """Attach to the engine once it is registered, and record its flushes."""
        if (before := self._listening.pop(engine, None)) is not None:
            before.cancel()
            await asyncio.wait([before])
        self._heard[engine], self._attached[engine] = Heard(), asyncio.Event()
        self._listening[engine] = asyncio.create_task(self._listen(engine))
        async with asyncio.timeout(60.0):
            await self._attached[engine].wait()

    async def _listen(self, engine: str) -> None:
        asked = AttachStream(self._owner, self._mesh.incarnation)
        async for flush in self._mesh.ref(engine).stream(Engine.attach, asked):
            self._attached[engine].set()
            self._note(self._heard[engine], flush)

    def _note(self, heard: Heard, flush: TokenBatch) -> None:
        now, start = time.monotonic(), 0
        if len(flush.tokens):
            heard.at.append(now)
            heard.tokens += len(flush.tokens)
            heard.versions.append(int(flush.token_versions.max()))
            newest = heard.versions[-1] >= self._wanted
            if self._first is not None and not self._first.done() and newest:
                self._first.set_result(now)
        for request, count, finish in zip(
            flush.request_ids.tolist(),
            flush.token_counts.tolist(),
            flush.finish_reasons.tolist(),
            strict=True,
        ):
            part = slice(start, start + count)
            start += count
            said = zip(
                flush.tokens[part].tolist(),
                flush.logprobs[part].tolist(),
                flush.token_versions[part].tolist(),
                strict=True,
            )
            self._said.setdefault(request, []).extend(said)
            over = self._over.get(request)
            if finish and over is not None and not over.done():
                over.set_result(finish)

    async def _submit(self, engine: str, count: int, most: int, greedy: bool) -> list[int]:
        ids = list(range(self._last + 1, self._last + 1 + count))
        self._last += count
        loop = asyncio.get_running_loop()
        self._over |= {i: loop.create_future() for i in ids}
        temperature = 0.0 if greedy else 1.0
        request = submission(self._mesh, [PROMPT] * count, ids, most, temperature)
        await self._mesh.ref(engine).call(Engine.submit, request)
        return ids

    async def generates(self, engine: str, count: int, most: int) -> None:
        await self._submit(engine, count, most, greedy=False)

    async def greedy(self, engine: str, most: int, within_s: float = 60.0) -> dict[str, Any]:
        """Return the engine's greedy completion: tokens, log-probabilities and versions."""
        (request,) = await self._submit(engine, 1, most, greedy=True)
        over, listening = self._over[request], self._listening[engine]
        either: set[asyncio.Future[Any]] = {over, listening}
        async with asyncio.timeout(within_s):
            await asyncio.wait(either, return_when="FIRST_COMPLETED")
        del self._over[request]
        if not over.done():
            raise RuntimeError(f"the stream of {engine} ended") from listening.exception()
        finish = over.result()
        tokens, logprobs, versions = zip(*self._said[request], strict=True)
        return {
            "tokens": tokens,
            "logprobs": logprobs,
            "versions": versions,
            "finish": FinishReason(finish).name,
        }

    async def first_token(self, engine: str, version: int, within_s: float = 120.0) -> float:
        """Return the time of the first token of this version or a later one, by the shared
        clock.
        """
        self._wanted = version
        self._first = asyncio.get_running_loop().create_future()
        await self.attach(engine)
        await self._submit(engine, 1, 8, greedy=True)
        async with asyncio.timeout(within_s):
            return await self._first

    def pauses(self, engine: str) -> dict[str, Any]:
        """Return milliseconds between flushes with tokens since the last call; version changes
        apart.
        """
        heard = self._heard[engine]
        plain: list[float] = []
        changed: list[float] = []
        for number in range(1, len(heard.at)):
            gap = 1e3 * (heard.at[number] - heard.at[number - 1])
            same = heard.versions[number] == heard.versions[number - 1]
            (plain if same else changed).append(gap)
        self._heard[engine] = Heard()
        return {
            "step_ms": statistics.median(plain) if plain else 0.0,
            "plain_ms": plain,
            "changed_ms": changed,
            "tokens": heard.tokens,
        }


async def main(which: str, name: str, job: str, *words: str) -> None:
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    kind = which if which == "engine" else "rollout"
    mesh = await Mesh.open(name, kind, MeshSettings.from_env(), job)
    member: object
    if which == "engine":
        member = Serving(mesh, job, *words)
    else:
        await mesh.join(None)
        member = Shard(mesh, job)
    await obey(member)
    os._exit(0)  # exits without deregistering: the parent process ends it


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
