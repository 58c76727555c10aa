"""The actor of a job's frozen models: scores given tokens and judges texts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.calls.role import Settle, Settled
from meshrl.common.api.scoring import (
    JudgeBatch,
    RoleScores,
    ScoreBatch,
    ScoredBatch,
    Scoring,
    Verdicts,
)
from meshrl.common.base.errors import MeshError, Refused
from meshrl.common.generation.contract import TokenEngine
from meshrl.common.mesh.residents.tiers import Keep, KeepsNothing, Take, Tiers
from meshrl.common.mesh.residents.turns import Turns
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import NotThere
from meshrl.common.mesh.runtime.serial_executor import SerialExecutor
from meshrl.common.model.files.storages import trim
from meshrl.common.model.tokens.tokenizer import Tokenizer

T = TypeVar("T")
Load = Callable[[], Awaitable[dict[str, "FrozenModel"]]]

COMPUTE_S = 3600.0  # for one batch: callers have deadlines by its size
WAIT_S = 20.0  # for models that are being loaded; who asks then asks again
LOOK_S = 0.25  # how soon the process ends after a batch broke it, whose caller is told first


@dataclass(frozen=True, slots=True)
class FrozenModel:
    engine: TokenEngine
    tokenizer: Tokenizer | None = None  # the model's own; only a judge needs one
    bytes: int = 0  # of its weights


class FrozenModels(KeepsNothing, Actor):
    """Serves the models of one job, one batch at a time: they share the accelerator, and an engine
    bears one thread.

    Who asks before they are loaded waits. After anything but a typed error nobody knows what state
    the models are in: the process is to end then, see `broken`.
    """

    interface = Scoring

    def __init__(self, mesh: Mesh, load: Load, turns: Turns | None = None) -> None:
        """`load` brings the models, as often as they are needed. `turns`: with others of its gang;
        None: it has the accelerator alone.
        """
        self.mesh, self._load = mesh, load
        self.turns = turns or Turns(mesh, "", "", 0)
        self.tiers = Tiers(mesh, self, *mesh.settings.places, turns=self.turns.settle)
        self._models: dict[str, FrozenModel] = {}
        self._loaded = asyncio.Event()
        self._thread = SerialExecutor(mesh, COMPUTE_S)
        self._draining = False
        self._failure: Exception | None = None
        self.sequences, self.tokens, self.busy_s = 0, 0, 0.0

    def stats(self) -> dict[str, Any]:
        return {
            **self.tiers.stats(),
            "loaded": self._loaded.is_set(),
            "models": {role: model.engine.path for role, model in self._models.items()},
            "sequences": self.sequences,
            "tokens_scored": self.tokens,
            "busy_s": self.busy_s,
        }

    def serve(self, models: dict[str, FrozenModel]) -> None:
        self._models = models
        self._loaded.set()

    async def stop(self) -> None:
        await self.tiers.stop()

    # -- sleep -----------------------------------------------------------------------------------

    @call(Scoring.settle)
    async def settle(self, wish: Settle) -> Settled:
        return await self.tiers.settle(wish)

    @property
    def bytes(self) -> int:
        return sum(model.bytes for model in self._models.values())

    async def sleep(self, keep: Keep) -> None:
        """Lets go of the models between two batches: they lie where they were loaded from."""
        if not self._loaded.is_set():
            raise Refused("it is loading", where=self.mesh.name, fix="wait until it has")
        self._loaded.clear()

        def let_go() -> None:
            self._models = {}
            trim()

        await self._thread.run(let_go, deadline_s=COMPUTE_S)

    async def wake(self, take: Take) -> None:
        """Loads them again, the same: they never change."""
        self.serve(await self._load())

    @property
    def draining(self) -> bool:
        return self._draining or self._failure is not None

    async def broken(self) -> Exception:
        """What broke the process, once something has."""
        while self._failure is None:
            await self.mesh.clock.sleep(LOOK_S)
        return self._failure

    @call(Scoring.score)
    async def score(self, batch: ScoreBatch) -> ScoredBatch:
        await self._wait()
        unknown = [role for role in batch.roles if role not in self._models]
        if unknown:
            raise Refused(f"the job has no model as {unknown[0]}", where=self.mesh.name)
        sequences = np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])

        def compute() -> list[RoleScores]:
            return [scores(role, self._models[role].engine, sequences) for role in batch.roles]

        found = await self._compute(compute)
        self.sequences += len(sequences)
        self.tokens += len(batch.tokens) * len(batch.roles)
        return ScoredBatch(found)

    @call(Scoring.judge)
    async def judge(self, batch: JudgeBatch) -> Verdicts:
        await self._wait()
        model = self._models.get("reward")
        if model is None or model.tokenizer is None:
            raise Refused("the job has no model that judges", where=self.mesh.name)
        found = await self._compute(lambda: verdicts(model, batch))
        self.sequences += 2 * len(batch.texts)
        return found

    async def _wait(self) -> None:
        async with self.mesh.clock.timeout(WAIT_S, "the frozen models to be loaded"):
            await self._loaded.wait()
        self._check()

    def _check(self) -> None:
        if self.draining:
            raise NotThere("the process is ending", where=self.mesh.name, fix="ask its successor")

    async def _compute(self, work: Callable[[], T]) -> T:
        def watched() -> T:
            self._check()  # it has waited for its turn
            if not self._models:
                raise NotThere("the models sleep", where=self.mesh.name, fix="ask again")
            started = self.mesh.clock.monotonic()
            try:
                return work()
            except MeshError:
                raise
            except Exception as error:
                self._failure = error
                raise
            finally:
                self.busy_s += self.mesh.clock.monotonic() - started

        return await self.turns.run(
            "score", lambda: self._thread.run(watched, deadline_s=COMPUTE_S)
        )

    @call(Scoring.drain)
    def drain(self, reason: str) -> None:
        """What is under way is asked for again where the models are next."""
        self._draining = True


def scores(role: str, engine: TokenEngine, sequences: Sequence[NDArray[np.int32]]) -> RoleScores:
    """Log-probabilities of each sequence's tokens, 0 for its first one."""
    found, errors = [], []
    for tokens in sequences:
        logprobs, error = np.zeros(len(tokens), np.float32), ""
        try:
            logprobs[1:] = engine.score(tokens)
        except MeshError as refused:
            error = str(refused)
        found.append(logprobs)
        errors.append(error)
    return RoleScores(role, np.concatenate([np.zeros(0, np.float32), *found]), errors)


def verdicts(model: FrozenModel, batch: JudgeBatch) -> Verdicts:
    """The probability of each text that it goes on with `yes`, if it goes on with `yes` or `no`."""
    assert model.tokenizer is not None
    found, errors = np.full(len(batch.texts), np.nan), [""] * len(batch.texts)
    try:
        endings = [model.tokenizer.encode(text) for text in (batch.yes, batch.no)]
    except MeshError as error:
        return Verdicts(found, [str(error)] * len(batch.texts))
    for i, text in enumerate(batch.texts):
        try:
            asked = model.tokenizer.begin(quoted(model.tokenizer, text))
            found_of = [model.engine.score(np.array(asked + end, np.int32)) for end in endings]
            yes, no = (
                float(np.sum(logprobs[-len(end) :], dtype=np.float64))
                for logprobs, end in zip(found_of, endings, strict=True)
            )
        except MeshError as error:
            errors[i] = str(error)
        else:
            found[i] = 1.0 / (1.0 + np.exp(np.clip(no - yes, -700.0, 700.0)))
    return Verdicts(found, errors)


def quoted(tokenizer: Tokenizer, parts: Sequence[str]) -> str:
    """The text with its untrusted parts, every second one, marked as such."""
    return "".join(tokenizer.quote(part) if i % 2 else part for i, part in enumerate(parts))
