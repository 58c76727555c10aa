"""An engine without compute: tokens by hash, at a declared rate of the clock it is given.

For simulations under virtual time and load tests. Each running request advances by `tokens_per_s`
whatever runs beside it; `step` brings all that is due by now and is never early.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common.clock import Clock
from common.errors import Refused
from services.rollout.engines.base import (
    ABORTED,
    LENGTH,
    RUNNING,
    STOP,
    Floats,
    Flush,
    Ints,
    Piece,
    Request,
    check,
    flush_of,
)
from services.rollout.engines.counter import draws, key_of, uniforms

if TYPE_CHECKING:
    from torch import Tensor

_NORMAL = NormalDist()


@dataclass(slots=True)
class _Running:
    request: Request
    started_s: float
    length: int  # tokens it will have generated at its end
    finish: int
    produced: int = 0


class SimulatedEngine:
    """Token at position p of a request is a hash of (its seed, p). Lengths are lognormal, drawn
    from (engine seed, request seed, context length), and cut by `max_new` and the slot; a request
    without stop ids always runs to that cut. Every token has log-probability -ln(vocab_size).
    """

    def __init__(
        self,
        clock: Clock,
        slots: int,
        tokens_per_s: float = 40.0,
        seed: int = 0,
        *,
        vocab_size: int = 64,
        max_length: int = 32768,
        median_length: float = 200.0,  # tokens
        sigma: float = 0.8,  # of the logarithm of the length
        version: int = 0,
    ) -> None:
        self.version = version
        self.tokens_generated = 0
        self.steps = 0
        self.busy_s = 0.0
        self.vocab_size, self.max_length = vocab_size, max_length
        self._clock, self._slots, self._rate, self._seed = clock, slots, tokens_per_s, seed
        self._median, self._sigma = median_length, sigma
        self._logprob = -math.log(vocab_size)
        self._running: dict[int, _Running] = {}
        self._queue: deque[Request] = deque()
        self._pieces: list[Piece] = []
        self._ended = False
        self._now_s = clock.monotonic()  # up to which everything has been brought
        self._paused = self._asleep = False

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def due_s(self) -> float:
        if not self._running:
            return 0.0
        soonest = min(r.started_s + (r.produced + 1) / self._rate for r in self._running.values())
        return max(0.0, soonest - self._clock.monotonic())

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            check(request, self.vocab_size)
            if request.stop_text:
                raise Refused(
                    f"request {request.id} has stop texts, and this engine has no tokenizer",
                    where="engine",
                    fix="stop at token ids",
                )
        self._advance()
        known = self._running.keys() | {request.id for request in self._queue}
        for request in requests:
            if request.id in known:
                continue
            known.add(request.id)
            if request.max_new < 1 or len(request.tokens) >= self.max_length:
                self._end(request.id, LENGTH)
            else:
                self._queue.append(request)
        self._fill(self._now_s)

    def abort(self, ids: Iterable[int]) -> None:
        self._advance()
        gone = set(ids)
        waiting = [request.id for request in self._queue if request.id in gone]
        self._queue = deque(request for request in self._queue if request.id not in gone)
        for request_id in (gone & self._running.keys()).union(waiting):
            self._running.pop(request_id, None)
            self._end(request_id, ABORTED)
        self._fill(self._now_s)

    def release(self, sessions: Iterable[int]) -> None:
        """Sessions hold nothing here."""

    def step(self) -> bool:
        self.steps += 1
        self._advance()
        return not self._paused and bool(self._running or self._queue)

    def drain(self, ended_only: bool = False) -> Flush | None:
        over = {piece.id for piece in self._pieces if piece.finish != RUNNING}
        pieces = [piece for piece in self._pieces if piece.id in over or not ended_only]
        self._pieces = [p for p in self._pieces if p.id not in over] if ended_only else []
        self._ended = False
        merged: dict[int, list[Piece]] = {}
        for piece in pieces:
            merged.setdefault(piece.id, []).append(piece)
        return flush_of([_whole(parts) for parts in merged.values()])

    def swap(self, state: Mapping[str, Tensor], version: int) -> None:
        self._advance()
        self.version = version

    def pause(self) -> None:
        self._advance()
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            now = self._clock.monotonic()
            for running in self._running.values():
                running.started_s += now - self._now_s
            self._now_s, self._paused = now, False

    def sleep(self) -> None:
        self._asleep = True
        self.pause()

    def wake(self, state: Mapping[str, Tensor], version: int) -> None:
        self.swap(state, version)
        if self._asleep:
            self._asleep = False
            self.resume()

    def score(self, tokens: Ints) -> NDArray[np.float32]:
        return np.full(len(tokens) - 1, self._logprob, np.float32)

    def _advance(self) -> None:
        """Brings all tokens that are due; a slot that came free was used from that moment on."""
        if self._paused:
            return
        now = self._clock.monotonic()
        if self._running:
            self.busy_s += now - self._now_s
        while self._running:
            first = min(self._running.values(), key=self._end_s)
            if self._end_s(first) > now:
                break
            del self._running[first.request.id]
            self._produce(first, first.length)
            self._end(first.request.id, first.finish)
            self._fill(self._end_s(first))
        for running in self._running.values():
            due = int((now - running.started_s) * self._rate + 1e-9)
            self._produce(running, min(due, running.length - 1))
        self._now_s = now

    def _end_s(self, running: _Running) -> float:
        return running.started_s + running.length / self._rate

    def _fill(self, at_s: float) -> None:
        while self._queue and len(self._running) < self._slots:
            request = self._queue.popleft()
            cut = min(request.max_new, self.max_length - len(request.tokens))
            length = min(cut, self._drawn_length(request)) if request.stop_ids else cut
            finish = STOP if request.stop_ids and length < cut else LENGTH
            self._running[request.id] = _Running(request, at_s, length, finish)

    def _drawn_length(self, request: Request) -> int:
        key = np.array([key_of(request.seed ^ key_of(self._seed))], np.uint64)
        uniform = float(uniforms(key, np.array([len(request.tokens)]))[0])
        return max(1, round(self._median * math.exp(self._sigma * _NORMAL.inv_cdf(uniform))))

    def _produce(self, running: _Running, until: int) -> None:
        count = until - running.produced
        if count <= 0:
            return
        request = running.request
        first = len(request.tokens) + running.produced
        tokens = self._tokens(request, first, count)
        running.produced = until
        if until == running.length and running.finish == STOP:
            tokens[-1] = request.stop_ids[0]
        self.tokens_generated += count
        logprobs = np.full(count, self._logprob, np.float32)
        versions = np.full(count, self.version, np.int32)
        unmodified = logprobs if request.unmodified else None
        self._pieces.append(Piece(request.id, tokens, logprobs, versions, unmodified=unmodified))

    def _tokens(self, request: Request, first: int, count: int) -> NDArray[np.int32]:
        """By hash from (seed, position), out of the vocabulary without the stop ids."""
        key = np.array([key_of(request.seed)], np.uint64)
        words = np.setdiff1d(np.arange(self.vocab_size, dtype=np.int32), request.stop_ids)
        index = draws(key, np.arange(first, first + count)) % np.uint64(len(words))
        return words[index.astype(np.int64)]

    def _end(self, request_id: int, code: int) -> None:
        none = np.zeros(0, np.int32)
        self._pieces.append(Piece(request_id, none, none.astype(np.float32), none, code))
        self._ended = True


def _whole(parts: list[Piece]) -> Piece:
    return Piece(
        parts[0].id,
        np.concatenate([p.tokens for p in parts]),
        np.concatenate([p.logprobs for p in parts]),
        np.concatenate([p.versions for p in parts]),
        next((p.finish for p in parts if p.finish != RUNNING), RUNNING),
        _joined_floats([p.unmodified for p in parts if p.unmodified is not None]),
    )


def _joined_floats(parts: list[Floats]) -> Floats | None:
    return np.concatenate(parts) if parts else None
