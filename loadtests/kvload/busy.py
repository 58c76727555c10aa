"""A request with a long stored prefix beside many short ones: what the order of prefill brings, and
what its loading costs those that decode.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from loadtests.kvload.scene import VOCAB, LoadOnly, Scene, scene
from loadtests.measuring.rounds import ratio
from meshrl.common.generation.builtin.schedule import Schedule
from meshrl.common.generation.contract import Request
from meshrl.common.generation.loading import CHUNK

LONG, SHORT = 16384, 22  # tokens of the one, and how many others there are: Cake's
LENGTHS, NEW = (32, 448), 48  # tokens of theirs, and that each generates
DECODED = 150  # tokens of each while nothing, or one prefix, is loaded


class Unprioritised(Schedule):
    """The oldest request has the budget first, whether its prefix is being loaded or not."""

    def _in_turn(self) -> list[int]:
        return list(self.joining)


def busy(directory: Path, rounds: int, model: str, long: int) -> dict[str, Any]:
    """Measure one request with a stored prefix of `long` tokens beside short ones."""
    length = long + 4 * CHUNK
    found: dict[str, list[float]] = {}
    with scene(model, length, directory, slots=SHORT + 2, kv_tokens=long + 40 * 512) as made:
        random = np.random.default_rng(1)
        tokens = random.integers(0, VOCAB, long + 1).astype(np.int32)
        size = made.store(tokens)
        made.files.settle(0.0)
        compute_s = made.first_token_s(tokens, "compute")
        rate = size / compute_s  # loading takes as long as computing
        plain = type(made.engine.schedule)
        for turn in range(rounds):
            arms: list[tuple[str, type[Schedule]]]
            arms = [("ours", plain), ("without", Unprioritised)]
            for name, kind in arms[:: 1 if turn % 2 else -1]:
                made.engine.schedule.__class__ = kind
                made.files.settle(rate)
                first_s, per_s = _together(made, tokens, turn)
                found.setdefault(f"{name}_ttft_s", []).append(first_s)
                found.setdefault(f"{name}_tokens_per_s", []).append(per_s)
            made.engine.schedule.__class__ = plain
            for name, loads in [("alone", False), ("loading", True)][:: 1 if turn % 2 else -1]:
                made.files.settle(8 * rate)
                found.setdefault(f"{name}_decoded_per_s", []).append(_decoding(made, tokens, loads))
    medians = {name: round(median(values), 3) for name, values in found.items()}
    return medians | {
        "ttft_ratio": ratio(found["ours_ttft_s"], found["without_ttft_s"]),
        "throughput_ratio": ratio(found["ours_tokens_per_s"], found["without_tokens_per_s"]),
        "decode_share": ratio(found["loading_decoded_per_s"], found["alone_decoded_per_s"]),
    }


def _short(made: Scene, seed: int, new: int) -> list[Request]:
    random = np.random.default_rng(seed)
    lengths = random.integers(*LENGTHS, SHORT, endpoint=True)
    prompts = [random.integers(0, VOCAB, int(n)).astype(np.int32) for n in lengths]
    return [made.request(prompt, new) for prompt in prompts]


def _together(made: Scene, tokens: np.ndarray, seed: int) -> tuple[float, float]:
    """Mean time to the first token of all, and tokens per second until all have ended."""
    made.forget()
    made.engine.prefixes = made.cache
    asked = [made.request(tokens, NEW), *_short(made, seed, NEW)]
    first: dict[int, float] = {}
    began = time.monotonic()
    made.engine.submit(asked)
    while made.engine.running or made.engine.waiting:
        if not made.engine.step():
            made.wake.wait(0.05)
            made.wake.clear()
        if (flush := made.engine.drain()) is not None:
            for request, count in zip(flush.ids.tolist(), flush.counts.tolist(), strict=True):
                if count:
                    first.setdefault(request, time.monotonic() - began)
    took_s = time.monotonic() - began
    given = sum(len(request.tokens) + NEW for request in asked)
    return mean(first.values()), given / took_s


def _decoding(made: Scene, tokens: np.ndarray, loads: bool) -> float:
    """Tokens per second of those that decode, while a prefix is loaded and not computed."""
    made.forget()
    made.engine.prefixes = LoadOnly(made.cache)
    made.engine.submit(_short(made, 0, DECODED))
    while made.engine.tokens_generated and made.engine.schedule.joining:
        made.engine.step()
    made.engine.step()
    if loads:
        made.engine.submit([made.request(tokens)])
    before, began = made.engine.tokens_generated, time.monotonic()
    while made.engine.running > loads:
        made.engine.step()
    rate = (made.engine.tokens_generated - before) / (time.monotonic() - began)
    made.engine.abort([made._ids])
    made.engine.drain()
    return rate
