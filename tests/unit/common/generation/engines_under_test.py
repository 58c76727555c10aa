"""Small engines, a clock that stands until told, and a reader that adds up what engines flush."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
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


class StandingClock:
    """Time passes only when `pass_` says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def pass_(self, seconds: float) -> None:
        self.now_s += seconds

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.pass_(seconds)
        await asyncio.sleep(0)

    def timeout(self, seconds: float, what: str) -> AbstractAsyncContextManager[None]:
        return LoopTimeout(seconds, what)


def decoder(seed: int = 0, config: ModelConfig = TINY) -> Decoder:
    """Random weights, sharp enough that tokens differ in probability."""
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
    """Random factors, large enough that tokens change."""
    draw, found = torch.Generator().manual_seed(seed), {}
    parts = build_projections(config)
    for layer in range(config.num_layers):
        for name in resolve_targets(config, targets):
            part = parts[name]
            for factor, shape in (("a", (rank, part.columns)), ("b", (part.rows, rank))):
                values = torch.randn(shape, generator=draw) * shape[1] ** -0.5
                found[f"layers.{layer}.adapters.{name}.{factor}"] = values
    return found


def with_adapter(
    tensors: dict[str, torch.Tensor], seed: int = 0, config: ModelConfig = TINY
) -> Decoder:
    """The model of `decoder` with an adapter merged."""
    model = decoder(seed, config)
    model.load_state_dict(merge_adapters(config, model.state_dict() | tensors, SCALE))
    return model


BUILT_IN = ("native", "graphs")  # paths of the built-in engine; see `built_in`


def text_of(tokens: Sequence[int]) -> str:
    """A text in which every token is two letters."""
    return "".join(chr(97 + t // 26) + chr(97 + t % 26) for t in tokens)


def built_in(
    path: str,
    slots: int = 4,
    max_length: int = 128,
    seed: int = 0,
    config: ModelConfig = TINY,
    **more: Any,
) -> BuiltinEngine:
    more = {"decode": text_of, "clock": StandingClock(), **more}
    gpu = path == "graphs" and torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
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
    own = id if seed is None else seed
    return GenerationRequest(id, context, max_new, temperature, stop_ids, own, session, **more)


@dataclass
class Heard:
    """Everything flushed for one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    unmodified: list[float] = field(default_factory=list)
    experts: list[list[int]] = field(default_factory=list)
    finish: list[int] = field(default_factory=list)  # codes other than RUNNING


class Listener:
    """Adds up flushes, and checks each one's shape."""

    def __init__(
        self,
        engine: TokenEngine,
        advance: Callable[[], None] = lambda: None,
        steps: SteppableEngine | None = None,
    ) -> None:
        self.engine, self.advance = engine, advance
        self._steps: SteppableEngine = steps or engine
        self.heard: dict[int, Heard] = {}

    def of(self, id: int) -> Heard:
        """What has been heard of one request."""
        return self.heard.setdefault(id, Heard())

    def drain(self) -> None:
        flush = self._steps.drain_outputs()
        if flush is not None:
            self.add(flush)

    def add(self, flush: EngineOutput) -> None:
        assert flush.ids.dtype == np.int64 and flush.finish_reasons.dtype == np.int8
        assert flush.counts.dtype == flush.tokens.dtype == flush.versions.dtype == np.int32
        assert flush.logprobs.dtype == np.float32
        assert flush.raw_logprobs.dtype == np.float32
        total = int(flush.counts.sum())
        assert len(flush.raw_logprobs) in (0, total)
        assert flush.experts.dtype == np.int16 and flush.experts.ndim == 2
        assert len(flush.experts) in (0, total)
        assert total == len(flush.tokens) == len(flush.logprobs) == len(flush.versions)
        at = 0
        for id, count, finish in zip(flush.ids, flush.counts, flush.finish_reasons, strict=True):
            heard = self.of(int(id))
            part = slice(at, at + int(count))
            at += int(count)
            heard.tokens += flush.tokens[part].tolist()
            heard.logprobs += flush.logprobs[part].tolist()
            heard.versions += flush.versions[part].tolist()
            heard.unmodified += flush.raw_logprobs[part].tolist()
            heard.experts += flush.experts[part].tolist()
            assert not heard.finish, "something came after the end"
            if finish:
                heard.finish.append(int(finish))

    def run(self, *requests: GenerationRequest, drain_every: int = 3) -> dict[int, Heard]:
        """Submits, steps until nothing is left, and returns what was heard."""
        self.engine.submit(list(requests))
        steps = 0
        while self._steps.step():
            self.advance()
            steps += 1
            if steps % drain_every == 0:
                self.drain()
            assert steps < 10_000
        self.drain()
        return self.heard


def simulated(slots: int = 4, rate: float = 40.0, **more: Any) -> tuple[SimulatedEngine, Listener]:
    clock = StandingClock()
    engine = SimulatedEngine(clock, slots, rate, vocab_size=VOCAB, **more)
    return engine, Listener(engine, lambda: clock.pass_(1 / rate))
