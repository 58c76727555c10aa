"""Benchmark of keys and values that are loaded while they are computed.

Usage:

    python -m loadtests.kvload [--arms sweep sockets busy turns cost] [--rounds 5]

`sweep`: the time to the first token after a stored prefix, computed, loaded and both, with the disk
slowed down so that loading takes 0.2 to 5 times as long as computing. `sockets`: the same with the
prefix on another host, behind the token bucket of its link. `busy`: the same request
beside 22 others. `turns`: conversations whose tools take longer than the cache lasts. `cost`: what
keeping costs when nothing comes back. The last line is one flat JSON object; figures of `sockets`
begin with the arm's name, those of one length are called `MODEL_TOKENS_RATIO_*`.
"""

from __future__ import annotations

import heapq
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from loadtests.kvload.link import linked
from loadtests.kvload.scene import VOCAB, LoadOnly, Scene, scene
from loadtests.kvload.sweep import OVER_SOCKETS, POINTS, Point, sweep
from loadtests.measuring.entry import options, report
from loadtests.measuring.metered import HostMeter
from loadtests.measuring.rounds import ratio, rotated
from meshrl.common.generation.builtin.scheduler import BatchScheduler
from meshrl.common.generation.engine_contract import NO_SESSION, GenerationRequest
from meshrl.common.generation.prefix_loading import CHUNK_TOKENS

LONG, SHORT = 16384, 22  # tokens of the one, and how many others there are: Cake's
LENGTHS, NEW = (32, 448), 48  # tokens of theirs, and that each generates
DECODED = 150  # tokens of each while nothing, or one prefix, is loaded
SESSIONS, TURNS = 6, 4
PROMPT, ANSWER, TOOL = 2048, 12, 64  # tokens
TOOL_S = 1.0
PASSING = 8  # sessions that never come back, one after the other


def turns(directory: Path, rounds: int, model: str, prompt: int) -> dict[str, Any]:
    """Measure wall time and tokens computed of the same conversations."""
    length = prompt + (TURNS + 1) * (ANSWER + TOOL) + CHUNK_TOKENS
    found: dict[str, list[float]] = {}
    two, wanted = 2 * (prompt + TURNS * (ANSWER + TOOL)), SESSIONS * length
    with (
        scene(model, length, directory / "small", slots=SESSIONS, kv_tokens=two) as small,
        scene(model, length, directory / "large", slots=SESSIONS, kv_tokens=wanted) as large,
    ):
        for turn in range(rounds):
            arms = [("without", small), ("with", small), ("roomy", large)]
            for name, made in rotated(arms, turn):
                made.forget(made.cache if name == "with" else None)
                wall_s, computed = _conversations(made, turn, prompt)
                found.setdefault(f"{name}_s", []).append(wall_s)
                found.setdefault(f"{name}_computed", []).append(computed)
                made.engine.release_sessions(range(1_000_000 * (turn + 1)))
    medians = {name: round(median(values), 3) for name, values in found.items()}
    return medians | {
        "wall_ratio": ratio(found["with_s"], found["without_s"]),
        "computed_ratio": ratio(found["with_computed"], found["without_computed"]),
    }


def _conversations(made: Scene, seed: int, prompt: int) -> tuple[float, float]:
    random = np.random.default_rng(seed)
    base = 1_000_000 * seed
    contexts = {
        base + i: random.integers(0, VOCAB, prompt).astype(np.int32) for i in range(SESSIONS)
    }
    left = dict.fromkeys(contexts, TURNS)
    due = [(0.0, session) for session in contexts]  # times at which each requests its next turn
    asked: dict[int, int] = {}
    said: dict[int, list[int]] = {}
    started_s, computed = time.monotonic(), made.engine.tokens_computed
    while due or asked:
        now_s = time.monotonic() - started_s
        while due and due[0][0] <= now_s:
            _, session = heapq.heappop(due)
            request = made.request(contexts[session], ANSWER, session)
            asked[request.id], said[session] = session, []
            made.engine.submit([request])
        if not made.engine.step():
            wait_s = due[0][0] - now_s if due else 0.02
            made.wake.wait(min(0.02, max(0.0, wait_s)))
            made.wake.clear()
        if (flush := made.engine.drain_outputs()) is None:
            continue
        tokens = np.split(flush.tokens, np.cumsum(flush.counts)[:-1])
        for identity, new, finish in zip(
            flush.ids.tolist(), tokens, flush.finish_reasons, strict=True
        ):
            session = asked[identity]
            said[session] += new.tolist()
            if finish:
                del asked[identity]
                tool = random.integers(0, VOCAB, TOOL)
                parts = contexts[session], said[session], tool
                contexts[session] = np.concatenate(parts).astype(np.int32)
                left[session] -= 1
                if left[session]:
                    heapq.heappush(due, (time.monotonic() - started_s + TOOL_S, session))
    return time.monotonic() - started_s, float(made.engine.tokens_computed - computed)


def cost(directory: Path, rounds: int, model: str, prompt: int) -> dict[str, Any]:
    """Measure CPU-seconds of sessions that are kept and never come back, over not keeping them."""
    found: dict[str, list[float]] = {}
    length = prompt + 2 * CHUNK_TOKENS
    with scene(model, length, directory, slots=2, kv_tokens=length + 64) as made:
        for turn in range(rounds):
            for name in ("kept", "not")[:: 1 if turn % 2 else -1]:
                made.forget(made.cache if name == "kept" else None)
                random = np.random.default_rng(turn)
                began_s = time.process_time()
                for i in range(PASSING):
                    tokens = random.integers(0, VOCAB, prompt).astype(np.int32)
                    session = 1_000_000 * turn + i if name == "kept" else NO_SESSION
                    made.engine.submit([made.request(tokens, ANSWER, session)])
                    made.finish()
                made.cache.writer.flush(60.0)
                found.setdefault(f"{name}_cpu_s", []).append(time.process_time() - began_s)
    return {"cost_ratio": ratio(found["kept_cpu_s"], found["not_cpu_s"], 4)}


class Unprioritised(BatchScheduler):
    """The oldest request has the budget first, whether its prefix is being loaded or not."""

    def _in_turn(self) -> list[int]:
        return list(self.prefill_slots)


def busy(directory: Path, rounds: int, model: str, long: int) -> dict[str, Any]:
    """Measure one request with a stored prefix of `long` tokens beside short ones."""
    length = long + 4 * CHUNK_TOKENS
    found: dict[str, list[float]] = {}
    with scene(model, length, directory, slots=SHORT + 2, kv_tokens=long + 40 * 512) as made:
        random = np.random.default_rng(1)
        tokens = random.integers(0, VOCAB, long + 1).astype(np.int32)
        size = made.store(tokens)
        made.files.settle(0.0)
        compute_s = made.first_token_s(tokens, "compute")
        rate = size / compute_s  # loading takes as long as computing
        plain = type(made.engine.scheduler)
        for turn in range(rounds):
            arms: list[tuple[str, type[BatchScheduler]]] = [
                ("ours", plain),
                ("without", Unprioritised),
            ]
            for name, kind in arms[:: 1 if turn % 2 else -1]:
                made.engine.scheduler.__class__ = kind
                made.files.settle(rate)
                first_s, per_s = _together(made, tokens, turn)
                found.setdefault(f"{name}_ttft_s", []).append(first_s)
                found.setdefault(f"{name}_tokens_per_s", []).append(per_s)
            made.engine.scheduler.__class__ = plain
            for name, loads in [("alone", False), ("loading", True)][:: 1 if turn % 2 else -1]:
                made.files.settle(8 * rate)
                found.setdefault(f"{name}_decoded_per_s", []).append(_decoding(made, tokens, loads))
    medians = {name: round(median(values), 3) for name, values in found.items()}
    return medians | {
        "ttft_ratio": ratio(found["ours_ttft_s"], found["without_ttft_s"]),
        "throughput_ratio": ratio(found["ours_tokens_per_s"], found["without_tokens_per_s"]),
        "decode_share": ratio(found["loading_decoded_per_s"], found["alone_decoded_per_s"]),
    }


def _short(made: Scene, seed: int, new: int) -> list[GenerationRequest]:
    random = np.random.default_rng(seed)
    lengths = random.integers(*LENGTHS, SHORT, endpoint=True)
    prompts = [random.integers(0, VOCAB, int(n)).astype(np.int32) for n in lengths]
    return [made.request(prompt, new) for prompt in prompts]


def _together(made: Scene, tokens: np.ndarray, seed: int) -> tuple[float, float]:
    made.forget(made.cache)
    asked = [made.request(tokens, NEW), *_short(made, seed, NEW)]
    first: dict[int, float] = {}
    started_s = time.monotonic()
    made.engine.submit(asked)
    while made.engine.num_running or made.engine.num_waiting:
        if not made.engine.step():
            made.wake.wait(0.05)
            made.wake.clear()
        if (flush := made.engine.drain_outputs()) is not None:
            for request, count in zip(flush.ids.tolist(), flush.counts.tolist(), strict=True):
                if count:
                    first.setdefault(request, time.monotonic() - started_s)
    took_s = time.monotonic() - started_s
    given = sum(len(request.tokens) + NEW for request in asked)
    return mean(first.values()), given / took_s


def _decoding(made: Scene, tokens: np.ndarray, loads: bool) -> float:
    """Return the tokens per second of decoding requests while a prefix is loaded, not computed."""
    made.forget(LoadOnly(made.cache))
    made.engine.submit(_short(made, 0, DECODED))
    while made.engine.tokens_generated and made.engine.scheduler.prefill_slots:
        made.engine.step()
    made.engine.step()
    if loads:
        made.engine.submit([made.request(tokens)])
    before, started_s = made.engine.tokens_generated, time.monotonic()
    while made.engine.num_running > loads:
        made.engine.step()
    rate = (made.engine.tokens_generated - before) / (time.monotonic() - started_s)
    made.engine.abort([made._ids])
    made.engine.drain_outputs()
    return rate


def point_of(text: str) -> Point:
    model, tokens, ratios = text.split(":")
    return Point(model, int(tokens), tuple(map(float, ratios.split(","))))


def main() -> None:
    parser = options(
        __doc__,
        arms=["sweep"],
        rounds=5,
        model=("30M", "of the other arms"),
        long=(LONG, "tokens of `busy`'s long prompt"),
        prompt=(PROMPT, "tokens of `turns` and `cost`"),
        directory=(Path, "on the disk that is read"),
    )
    parser.add_argument(
        "--points",
        nargs="+",
        type=point_of,
        metavar="MODEL:TOKENS:RATIOS",
        help="of `sweep` and `sockets`, such as 30M:2048:0.2,1,5; a model is 1M, 30M or 200M",
    )
    chosen = parser.parse_args()
    use = HostMeter()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
        if "sweep" in chosen.arms:
            points: Sequence[Point] = chosen.points or POINTS
            found |= sweep(points, Path(directory), chosen.rounds)
        if "sockets" in chosen.arms:
            points = chosen.points or OVER_SOCKETS
            there = sweep(points, Path(directory) / "there", chosen.rounds, linked)
            found |= {f"sockets_{name}": figure for name, figure in there.items()}
        sizes = {"busy": chosen.long, "turns": chosen.prompt, "cost": chosen.prompt}
        for name, arm in (("busy", busy), ("turns", turns), ("cost", cost)):
            if name in chosen.arms:
                where = Path(directory) / name
                figures = arm(where, chosen.rounds, chosen.model, sizes[name])
                print(name, figures, flush=True)
                found |= figures
    report(found | use.get_validity(paced=True))


if __name__ == "__main__":
    main()
