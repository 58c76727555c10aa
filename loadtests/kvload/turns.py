"""Conversations whose tools take longer than the engine's cache lasts, with and without shelves;
and what keeping costs where nothing comes back.
"""

from __future__ import annotations

import heapq
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from loadtests.kvload.scene import VOCAB, Scene, scene
from loadtests.measuring.rounds import ratio, ratios, rotated
from meshrl.common.generation.contract import NO_SESSION, Request
from meshrl.common.generation.loading import CHUNK

SESSIONS, TURNS = 6, 4
PROMPT, ANSWER, TOOL = 2048, 12, 64  # tokens
TOOL_S = 1.0
PASSING = 8  # sessions that never come back, one after the other


def turns(directory: Path, rounds: int, model: str, prompt: int) -> dict[str, Any]:
    """Measure wall time and tokens computed of the same conversations."""
    length = prompt + (TURNS + 1) * (ANSWER + TOOL) + CHUNK
    found: dict[str, list[float]] = {}
    two, wanted = 2 * (prompt + TURNS * (ANSWER + TOOL)), SESSIONS * length
    with (
        scene(model, length, directory / "small", slots=SESSIONS, kv_tokens=two) as small,
        scene(model, length, directory / "large", slots=SESSIONS, kv_tokens=wanted) as large,
    ):
        for turn in range(rounds):
            arms = [("without", small), ("with", small), ("roomy", large)]
            for name, made in rotated(arms, turn):
                made.forget()
                made.engine.prefixes = made.cache if name == "with" else None
                wall_s, computed = _conversations(made, turn, prompt)
                found.setdefault(f"{name}_s", []).append(wall_s)
                found.setdefault(f"{name}_computed", []).append(computed)
                made.engine.release(range(1_000_000 * (turn + 1)))
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
    due = [(0.0, session) for session in contexts]  # when each asks for its next turn
    asked: dict[int, int] = {}
    said: dict[int, list[int]] = {}
    began, computed = time.monotonic(), made.engine.tokens_computed
    while due or asked:
        now_s = time.monotonic() - began
        while due and due[0][0] <= now_s:
            _, session = heapq.heappop(due)
            request = _turn(made, session, contexts[session])
            asked[request.id], said[session] = session, []
            made.engine.submit([request])
        if not made.engine.step():
            wait_s = due[0][0] - now_s if due else 0.02
            made.wake.wait(min(0.02, max(0.0, wait_s)))
            made.wake.clear()
        if (flush := made.engine.drain()) is None:
            continue
        tokens = np.split(flush.tokens, np.cumsum(flush.counts)[:-1])
        for identity, new, finish in zip(flush.ids.tolist(), tokens, flush.finish, strict=True):
            session = asked[identity]
            said[session] += new.tolist()
            if finish:
                del asked[identity]
                tool = random.integers(0, VOCAB, TOOL)
                parts = contexts[session], said[session], tool
                contexts[session] = np.concatenate(parts).astype(np.int32)
                left[session] -= 1
                if left[session]:
                    heapq.heappush(due, (time.monotonic() - began + TOOL_S, session))
    return time.monotonic() - began, float(made.engine.tokens_computed - computed)


def _turn(made: Scene, session: int, context: np.ndarray) -> Request:
    request = made.request(context, ANSWER)
    request.session = session
    return request


def cost(directory: Path, rounds: int, model: str, prompt: int) -> dict[str, Any]:
    """Measure CPU-seconds of sessions that end up on the shelves and never come back, over the same
    where nothing is kept.
    """
    found: dict[str, list[float]] = {}
    length = prompt + 2 * CHUNK
    with scene(model, length, directory, slots=2, kv_tokens=length + 64) as made:
        for turn in range(rounds):
            for name in ("kept", "not")[:: 1 if turn % 2 else -1]:
                made.forget()
                made.engine.prefixes = made.cache if name == "kept" else None
                random = np.random.default_rng(turn)
                began, cpu_s = time.monotonic(), time.process_time()
                for i in range(PASSING):
                    tokens = random.integers(0, VOCAB, prompt).astype(np.int32)
                    request = made.request(tokens, ANSWER)
                    request.session = 1_000_000 * turn + i if name == "kept" else NO_SESSION
                    made.engine.submit([request])
                    made.finish()
                made.cache.writer.flush(60.0)
                found.setdefault(f"{name}_cpu_s", []).append(time.process_time() - cpu_s)
                found.setdefault(f"{name}_s", []).append(time.monotonic() - began)
        written = sum(made.cache.writer.written.values())
    spans = {
        key: sorted(ratios(found[f"kept_{unit}"], found[f"not_{unit}"]))
        for key, unit in (("cost_ratio", "cpu_s"), ("cost_wall_ratio", "s"))
    }
    return (
        {name: round(median(values), 3) for name, values in found.items()}
        | {name: round(median(values), 4) for name, values in spans.items()}
        | {f"{name}_span": [round(v[0], 3), round(v[-1], 3)] for name, v in spans.items()}
        | {"written_bytes": written}
    )
