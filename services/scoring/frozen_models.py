"""Actor of a job's frozen models: scores given tokens and judges texts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.calls.role import SetTier, TierUsage
from meshrl.common.api.scoring import (
    JudgeBatch,
    RoleLogprobs,
    ScoreBatch,
    ScoredBatch,
    Scoring,
    Verdicts,
)
from meshrl.common.base.errors import MeshError, Refused
from meshrl.common.base.files.releasable_memory import ReleasableMemory
from meshrl.common.generation.builtin.engine import BuiltinEngine
from meshrl.common.generation.engine_memory import CombinedMemory
from meshrl.common.mesh.instances.kind_calls import KindCallsMixin
from meshrl.common.mesh.instances.kind_controller import KindController, TensorsOfKind
from meshrl.common.mesh.instances.tiers import StatelessSleeper, TierController
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.runtime.calls.actor import call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import ServiceUnavailable
from meshrl.common.mesh.runtime.serial_executor import SerialExecutor
from meshrl.common.model.files.tensor_storages import trim_heap
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.common.state.pool.workers.rows import TensorKind, Tier

T = TypeVar("T")
KINDS = (TensorKind.PARAMETERS,)  # that a batch computes with
BuildModels = Callable[[], Awaitable[dict[str, "FrozenModel"]]]
# Reads the models into host memory, and returns a function that puts them on the accelerator.
ReadModels = Callable[[], Awaitable[BuildModels]]

COMPUTE_TIMEOUT_S = 3600.0  # for one batch: callers set deadlines by its size
LOAD_WAIT_S = 20.0  # for models that are being loaded; callers then retry
POLL_S = 0.25  # delay of the exit after a failed batch, whose caller gets the error first


@dataclass(frozen=True, slots=True)
class FrozenModel:
    engine: BuiltinEngine
    tokenizer: Tokenizer | None = None  # only a judge needs one
    size_bytes: int = 0  # of its weights and its cache


class FrozenModels(StatelessSleeper, KindCallsMixin):
    """Actor that serves the models of one job, one batch at a time.

    The models share the accelerator, and an engine supports one thread. Calls before the models are
    loaded wait. After an error that is not typed, the state of the models is unknown. The process
    must then exit, see `wait_for_failure`.
    """

    interface = Scoring

    def __init__(
        self, mesh: Mesh, read_models: ReadModels, time_slices: SliceClient | None = None
    ) -> None:
        """Create the actor; `read_models` reads the models at the start and after each sleep.

        `time_slices`: slices of a shared accelerator; None: the actor has it alone.
        """
        self.mesh, self._read_models = mesh, read_models
        self.time_slices = time_slices or SliceClient(mesh, "", "", 0)
        self.kinds = KindController(
            mesh,
            {
                TensorKind.PARAMETERS: TensorsOfKind(
                    self._collect_weights, self._measure_weights, self._load_again
                )
            },
            self._run_blocking,
            *mesh.settings.offload_targets,
            is_time_sliced=lambda: self.time_slices.is_enabled,
        )
        self.tiers = TierController(
            mesh,
            self,
            self.kinds,
            set_time_slicing=self.time_slices.set_enabled,
        )
        self._models: dict[str, FrozenModel] = {}
        self._loaded_event = asyncio.Event()
        self._thread = SerialExecutor(mesh, COMPUTE_TIMEOUT_S)
        self._draining = False
        self._failure: Exception | None = None
        self.num_sequences, self.num_tokens, self.busy_s = 0, 0, 0.0

    def stats(self) -> dict[str, Any]:
        return {
            **self.tiers.stats(),
            "loaded": self._loaded_event.is_set(),
            "models": {role: model.engine.backend for role, model in self._models.items()},
            "sequences": self.num_sequences,
            "tokens_scored": self.num_tokens,
            "busy_s": self.busy_s,
        }

    async def load(self) -> None:
        """Load the models in a time slice, in which other instances leave room for them.

        What is not on this host, such as version 0, is read before.
        """
        build = await self._read_models()

        async def compute() -> None:
            self.set_models(await build())

        await self.time_slices.run_in_slice("load", compute)

    def set_models(self, models: dict[str, FrozenModel]) -> None:
        self._models = models
        self._loaded_event.set()

    async def stop(self) -> None:
        await self.tiers.stop()

    # -- sleep -----------------------------------------------------------------------------------

    @call(Scoring.set_tier)
    async def settle(self, wish: SetTier) -> TierUsage:
        return await self.tiers.set_tier(wish)

    def _measure_weights(self) -> int:
        return sum(model.size_bytes for model in self._models.values())

    async def sleep(self, tier: Tier) -> None:
        """Release the models between two batches; `wake` loads them again from their source."""
        if not self._loaded_event.is_set():
            raise Refused(
                "the models are loading", where=self.mesh.name, fix="Wait until they are loaded"
            )
        self._loaded_event.clear()

        def let_go() -> None:
            self._models = {}
            trim_heap()

        async with self.kinds.use_kinds():
            await self._thread.run(let_go, deadline_s=COMPUTE_TIMEOUT_S)
            self.kinds.forget_all()
            self.kinds.is_asleep = True
        await self.kinds.drop_copies()

    async def wake(self) -> None:
        """Load the same models again: they never change."""
        build = await self._read_models()
        self.set_models(await build())

    @property
    def draining(self) -> bool:
        return self._draining or self._failure is not None

    async def wait_for_failure(self) -> Exception:
        """Return the error that broke the process, once there is one."""
        while self._failure is None:
            await self.mesh.clock.sleep(POLL_S)
        return self._failure

    @call(Scoring.score_sequences)
    async def score(self, batch: ScoreBatch) -> ScoredBatch:
        await self._wait_until_loaded()
        unknown = [role for role in batch.roles if role not in self._models]
        if unknown:
            raise Refused(f"the job has no model for the role {unknown[0]}", where=self.mesh.name)
        sequences = np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])

        def compute() -> list[RoleLogprobs]:
            return [
                score_sequences(role, self._models[role].engine, sequences) for role in batch.roles
            ]

        found = await self._run_in_slice(compute)
        self.num_sequences += len(sequences)
        self.num_tokens += len(batch.tokens) * len(batch.roles)
        return ScoredBatch(found)

    @call(Scoring.judge_texts)
    async def judge(self, batch: JudgeBatch) -> Verdicts:
        await self._wait_until_loaded()
        model = self._models.get("reward")
        if model is None or model.tokenizer is None:
            raise Refused("the job has no reward model that can judge", where=self.mesh.name)
        found = await self._run_in_slice(lambda: judge_texts(model, batch))
        self.num_sequences += 2 * len(batch.texts)
        return found

    async def _wait_until_loaded(self) -> None:
        async with self.mesh.clock.timeout(LOAD_WAIT_S, "loading the frozen models"):
            await self._loaded_event.wait()
        self._check_not_draining()

    def _check_not_draining(self) -> None:
        if self.draining:
            raise ServiceUnavailable(
                "the process is shutting down", where=self.mesh.name, fix="Call its successor"
            )

    def _collect_weights(self) -> ReleasableMemory:
        """Return the memory of weights and caches: a model needs both to score."""
        parts: dict[str, ReleasableMemory] = {}
        for role, model in self._models.items():
            parts[role] = model.engine.collect_weights()
            parts[f"{role} cache"] = model.engine.collect_cache()
        return CombinedMemory(parts)

    async def _load_again(self, memory: ReleasableMemory) -> None:
        """Load the models from their source; the engines of the freed memory are not used again."""
        await self.wake()

    async def _run_blocking(self, work: Callable[..., T], *args: Any) -> T:
        return await self._thread.run(work, *args, deadline_s=COMPUTE_TIMEOUT_S)

    async def _run_in_slice(self, work: Callable[[], T]) -> T:
        def watched() -> T:
            self._check_not_draining()  # the batch may have waited for its turn
            if not self._models:
                raise ServiceUnavailable("the models sleep", where=self.mesh.name, fix="Retry")
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

        async def compute() -> T:
            async with self.kinds.use_kinds(KINDS):
                return await self._thread.run(watched, deadline_s=COMPUTE_TIMEOUT_S)

        return await self.time_slices.run_in_slice("score", compute, kinds=KINDS)

    @call(Scoring.drain)
    def drain(self, reason: str) -> None:
        """Stop accepting batches; callers repeat current ones where the models run next."""
        self._draining = True


def score_sequences(
    role: str, engine: BuiltinEngine, sequences: Sequence[NDArray[np.int32]]
) -> RoleLogprobs:
    """Return the log-probabilities of each sequence's tokens, 0 for its first one."""
    found, errors = [], []
    for tokens in sequences:
        logprobs, error = np.zeros(len(tokens), np.float32), ""
        try:
            logprobs[1:] = engine.score(tokens)
        except MeshError as refused:
            error = str(refused)
        found.append(logprobs)
        errors.append(error)
    return RoleLogprobs(role, np.concatenate([np.zeros(0, np.float32), *found]), errors)


def judge_texts(model: FrozenModel, batch: JudgeBatch) -> Verdicts:
    """Return each text's probability that `yes` follows, given that `yes` or `no` does."""
    assert model.tokenizer is not None
    found, errors = np.full(len(batch.texts), np.nan), [""] * len(batch.texts)
    try:
        endings = [model.tokenizer.encode(text) for text in (batch.yes, batch.no)]
    except MeshError as error:
        return Verdicts(found, [str(error)] * len(batch.texts))
    for i, text in enumerate(batch.texts):
        try:
            prompt_ids = model.tokenizer.encode_start(escape_untrusted_parts(model.tokenizer, text))
            found_of = [model.engine.score(np.array(prompt_ids + end, np.int32)) for end in endings]
            yes, no = (
                float(np.sum(logprobs[-len(end) :], dtype=np.float64))
                for logprobs, end in zip(found_of, endings, strict=True)
            )
        except MeshError as error:
            errors[i] = str(error)
        else:
            found[i] = 1.0 / (1.0 + np.exp(np.clip(no - yes, -700.0, 700.0)))
    return Verdicts(found, errors)


def escape_untrusted_parts(tokenizer: Tokenizer, parts: Sequence[str]) -> str:
    """Return the text with every second part, which is untrusted, escaped."""
    return "".join(tokenizer.escape(part) if i % 2 else part for i, part in enumerate(parts))
