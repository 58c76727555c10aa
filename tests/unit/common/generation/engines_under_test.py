"""Small engines for tests, a manual clock, and a collector of engine outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from meshrl.common.base.clock import LoopTimeout
from meshrl.common.generation.builtin.engine_builder import BuiltinEngine, build_engine
from meshrl.common.generation.engine_contract import (
    EngineOutput,
    GenerationRequest,
    SteppableEngine,
    TokenEngine,
)
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.architecture.projections import build_projections, resolve_targets
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.network.lora import merge_adapters
from meshrl.sim.engines.simulated_engine import SimulatedEngine

VOCAB = 40
TINY = ModelConfig(
    architecture="qwen3",
    vocab_size=VOCAB,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    qk_norm=True,
    max_positions=1024,
)


MOE = replace(
    TINY,
    architecture="qwen3_moe",
    num_layers=3,
    num_experts=6,
    num_experts_per_token=2,
    expert_ffn_size=24,
    normalise_routing=True,
    router_aux_loss_coef=0.01,
    dense_layers=(1,),
)


class ManualClock:
    """Clock that advances only by `advance` and `sleep`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)

    def timeout(self, seconds: float, what: str) -> AbstractAsyncContextManager[None]:
        return LoopTimeout(seconds, what)


def decoder(seed: int = 0, config: ModelConfig = TINY) -> Decoder:
    """Return a decoder with random weights, sharp enough that tokens differ in probability."""
    model = Decoder(config)
    model.initialise(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        model.unembedding.mul_(2)
    return model


ATTENTION, EVERY = ("qkv", "output"), ("qkv", "output", "gate_up", "down")
SCALE = 0.5


def adapter(
    seed: int, rank: int = 4, targets: Sequence[str] = EVERY, config: ModelConfig = TINY
) -> dict[str, torch.Tensor]:
    """Return random factors, large enough that tokens change."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    parts = build_projections(config)
    for layer in range(config.num_layers):
        for name in resolve_targets(config, targets):
            part = parts[name]
            for factor, shape in (("a", (rank, part.columns)), ("b", (part.rows, rank))):
                values = torch.randn(shape, generator=generator) * shape[1] ** -0.5
                tensors[f"layers.{layer}.adapters.{name}.{factor}"] = values
    return tensors


def with_adapter(
    tensors: dict[str, torch.Tensor], seed: int = 0, config: ModelConfig = TINY
) -> Decoder:
    """Return the model of `decoder` with an adapter merged."""
    model = decoder(seed, config)
    model.load_state_dict(merge_adapters(config, model.state_dict() | tensors, SCALE))
    return model


BUILT_IN = ("native", "graphs")  # backends of the built-in engine; see `built_in`
# The same as cases of tests. Steps of the graphs backend cost 30 times as much on a CPU.
PATHS = (
    pytest.param("native", marks=pytest.mark.needs("compiler")),
    pytest.param("graphs", marks=pytest.mark.rotating(2)),
)


def text_of(tokens: Sequence[int]) -> str:
    """Return a text in which every token is two letters."""
    return "".join(chr(97 + t // 26) + chr(97 + t % 26) for t in tokens)


def built_in(
    path: str,
    slots: int = 4,
    max_length: int = 128,
    seed: int = 0,
    config: ModelConfig = TINY,
    **more: Any,
) -> BuiltinEngine:
    more = {"decode_tokens": text_of, "clock": ManualClock(), **more}
    uses_gpu = path == "graphs" and torch.cuda.is_available()
    device = "cuda" if uses_gpu else "cpu"
    engine = build_engine(config, slots, max_length, backend=path, device=device, **more)
    engine.wake(decoder(seed, config).state_dict(), 0)
    return engine


def request(
    id: int,
    tokens: Iterable[int] = (1, 2, 3),
    *,
    max_new: int = 20,
    temperature: float = 1.0,
    stop_ids: tuple[int, ...] = (),
    seed: int | None = None,
    session: int = -1,
    **more: Any,
) -> GenerationRequest:
    context = np.array(list(tokens), np.int32)
    seed_value = id if seed is None else seed
    return GenerationRequest(
        id, context, max_new, temperature, stop_ids, seed_value, session, **more
    )


@dataclass
class CollectedOutput:
    """All outputs of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    experts: list[list[int]] = field(default_factory=list)
    finish: list[int] = field(default_factory=list)  # codes other than RUNNING


class Listener:
    """Collector of engine outputs, which checks the shape of each."""

    def __init__(
        self,
        engine: TokenEngine,
        advance: Callable[[], None] = lambda: None,
        steps: SteppableEngine | None = None,
    ) -> None:
        self.engine, self.advance = engine, advance
        self._steps: SteppableEngine = steps or engine
        self.outputs: dict[int, CollectedOutput] = {}

    def get_output(self, id: int) -> CollectedOutput:
        """Return the output of one request so far."""
        return self.outputs.setdefault(id, CollectedOutput())

    def drain(self) -> None:
        batch = self._steps.drain_outputs()
        if batch is not None:
            self.add(batch)

    def add(self, batch: EngineOutput) -> None:
        assert batch.ids.dtype == np.int64 and batch.finish_reasons.dtype == np.int8
        assert batch.counts.dtype == batch.tokens.dtype == batch.versions.dtype == np.int32
        assert batch.logprobs.dtype == np.float32
        assert batch.raw_logprobs.dtype == np.float32
        total = int(batch.counts.sum())
        assert len(batch.raw_logprobs) in (0, total)
        assert batch.experts.dtype == np.int16 and batch.experts.ndim == 2
        assert len(batch.experts) in (0, total)
        assert total == len(batch.tokens) == len(batch.logprobs) == len(batch.versions)
        position = 0
        for id, count, finish in zip(batch.ids, batch.counts, batch.finish_reasons, strict=True):
            output = self.get_output(int(id))
            span = slice(position, position + int(count))
            position += int(count)
            output.tokens += batch.tokens[span].tolist()
            output.logprobs += batch.logprobs[span].tolist()
            output.versions += batch.versions[span].tolist()
            output.raw_logprobs += batch.raw_logprobs[span].tolist()
            output.experts += batch.experts[span].tolist()
            assert not output.finish, "output after the end of the request"
            if finish:
                output.finish.append(int(finish))

    def run(self, *requests: GenerationRequest, drain_every: int = 3) -> dict[int, CollectedOutput]:
        """Submit requests, step until nothing is left, and return the outputs by request."""
        self.engine.submit(list(requests))
        steps = 0
        while self._steps.step():
            self.advance()
            steps += 1
            if steps % drain_every == 0:
                self.drain()
            assert steps < 10_000
        self.drain()
        return self.outputs


def simulated(slots: int = 4, rate: float = 40.0, **more: Any) -> tuple[SimulatedEngine, Listener]:
    clock = ManualClock()
    engine = SimulatedEngine(clock, slots, rate, vocab_size=VOCAB, **more)
    return engine, Listener(engine, lambda: clock.advance(1 / rate))
