"""Built-in engines with random weights, and requests that they run to the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from loadtests.gpu.plan import Incorrect, Settings
from meshrl.common.generation.builtin.engine_builder import BuiltinEngine, build_engine
from meshrl.common.generation.engine_contract import EngineOutput, GenerationRequest, TokenEngine
from meshrl.common.model.architecture.config import ModelConfig


def start_engine(
    settings: Settings, config: ModelConfig, slots: int, max_length: int, dtype: str
) -> BuiltinEngine:
    """Return an engine of the device, which sleeps until it gets weights."""
    backend = "graphs" if settings.device == "cpu" else "auto"
    return build_engine(
        config, slots, max_length, backend=backend, device=settings.device, dtype=dtype
    )


def draw_prompts(config: ModelConfig, count: int, length: int) -> list[NDArray[np.int32]]:
    """Return random prompts, the same in each process."""
    drawn = np.random.default_rng(0).integers(0, config.vocab_size, (count, length))
    return list(drawn.astype(np.int32))


def build_requests(
    prompts: Sequence[NDArray[np.int32]], new_tokens: int, temperature: float = 0.0, first: int = 0
) -> list[GenerationRequest]:
    """Return a request for each prompt; `first` is the first of their ids and seeds."""
    return [
        GenerationRequest(first + i, prompt, new_tokens, temperature, (), first + i, -1)
        for i, prompt in enumerate(prompts)
    ]


def generate(
    engine: TokenEngine,
    requests: Sequence[GenerationRequest],
    deadline_s: float = 60.0,
    on_output: Callable[[EngineOutput], None] = lambda _: None,
) -> Mapping[int, tuple[NDArray[np.int32], NDArray[np.float32]]]:
    """Run requests to the end; return the new tokens and log-probabilities of each, by id."""
    engine.submit(requests)
    parts: dict[int, list[tuple[NDArray[np.int32], NDArray[np.float32]]]] = {}
    end = time.monotonic() + deadline_s
    while engine.num_running or engine.num_waiting:
        if time.monotonic() > end:
            raise Incorrect(f"{len(requests)} requests did not end within {deadline_s:g} s")
        engine.step()
        if (output := engine.drain_outputs()) is not None:
            on_output(output)
            _collect(output, parts)
    return {
        request: (np.concatenate([p[0] for p in found]), np.concatenate([p[1] for p in found]))
        for request, found in parts.items()
    }


def _collect(
    output: EngineOutput, parts: dict[int, list[tuple[NDArray[np.int32], NDArray[np.float32]]]]
) -> None:
    ends = np.cumsum(output.counts)[:-1]
    pieces = zip(np.split(output.tokens, ends), np.split(output.logprobs, ends), strict=True)
    for request, piece in zip(output.ids.tolist(), pieces, strict=True):
        parts.setdefault(request, []).append(piece)


def copy_to_host(state: Mapping[str, Tensor], pinned: bool = False) -> dict[str, Tensor]:
    """Return host copies of weights; `pinned`: in memory that the device copies from directly."""
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
    return {name: copy.pin_memory() for name, copy in copies.items()} if pinned else copies
