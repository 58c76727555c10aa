"""An engine without a model: tokens come from a hash, at a declared rate of the clock it is given.

For simulations under virtual time and load tests. Each running request advances by `tokens_per_s`
whatever runs beside it; `step` brings all that is due by now and is never early. Slots are columns
of arrays, and tokens are made when they are drained: a step costs no Python per request.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.engine import Finish
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import Refused
from meshrl.common.generation.contract import (
    NO_FLOATS,
    NO_VERSION,
    Flush,
    FlushPiece,
    Ints,
    Request,
    Unshared,
    check,
    flush_of,
    in_use,
    joined,
    no_weights,
    replacing,
)
from meshrl.common.generation.counter import draws, key_of, uniforms

if TYPE_CHECKING:
    from torch import Tensor


NORMAL = NormalDist()
_ROUNDING = 1e-9  # share of a token: a step at exactly the time of a token brings it
NEVER_S = math.inf  # when a slot without a request ends it
NO_STOP = np.iinfo(np.int32).max  # above every token


class _SimulatedSlots:
    """Per slot, what runs in it and how far it has come. `produced` counts tokens that are due,
    `flushed` those that have left.
    """

    def __init__(self, count: int) -> None:
        self.requests: list[Request | None] = [None] * count
        self.slot_of: dict[int, int] = {}  # request id -> slot
        self.free = list(range(count - 1, -1, -1))  # the next one last
        self.ids = np.full(count, -1, np.int64)
        self.started_s = np.zeros(count)
        self.ends_s = np.full(count, NEVER_S)
        self.length = np.zeros(count, np.int64)  # tokens it will have generated at its end
        self.produced = np.zeros(count, np.int64)
        self.flushed = np.zeros(count, np.int64)
        self.context = np.zeros(count, np.int64)  # tokens given
        self.key = np.zeros(count, np.uint64)
        self.stops = np.full((count, 1), NO_STOP, np.int64)  # in order, padded with NO_STOP
        self.words = np.ones(count, np.uint64)  # vocabulary without the stops
        self.finish = np.zeros(count, np.int8)  # how it will end
        self.unmodified = np.zeros(count, bool)  # asked for
        self.adapter = np.zeros(count, np.int64)  # number of its adapter; 0: none

    def place(
        self,
        request: Request,
        at_s: float,
        ends_s: float,
        length: int,
        finish: Finish,
        vocab: int,
        adapter: int,
    ) -> int:
        slot = self.free.pop()
        self.requests[slot], self.slot_of[request.id] = request, slot
        self.ids[slot], self.started_s[slot], self.ends_s[slot] = request.id, at_s, ends_s
        self.length[slot], self.finish[slot] = length, finish
        self.produced[slot] = self.flushed[slot] = 0
        self.context[slot], self.key[slot] = len(request.tokens), key_of(request.seed)
        stops = sorted({t for t in request.stop_ids if 0 <= t < vocab})
        missing = len(stops) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=NO_STOP)
        self.stops[slot] = NO_STOP
        self.stops[slot, : len(stops)] = stops
        self.words[slot] = vocab - len(stops)
        self.unmodified[slot], self.adapter[slot] = request.unmodified, adapter
        return slot

    def clear(self, slot: int) -> Request:
        request = self.requests[slot]
        assert request is not None
        self.requests[slot] = None
        del self.slot_of[request.id]
        self.ids[slot], self.ends_s[slot] = -1, NEVER_S
        self.produced[slot] = self.flushed[slot] = self.length[slot] = 0
        self.free.append(slot)
        return request

    def tokens(self, rows: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The `places`-th new token of slot `rows`, each: by hash from (seed, position), out of the
        vocabulary without the stop ids; a stop id where the request is to stop.
        """
        drawn = draws(self.key[rows], self.context[rows] + places) % self.words[rows]
        tokens = drawn.astype(np.int64)
        for stop in self.stops.T:
            tokens += tokens >= stop[rows]
        last = (places + 1 == self.length[rows]) & (self.finish[rows] == Finish.STOP)
        for i in np.flatnonzero(last).tolist():
            request = self.requests[int(rows[i])]
            assert request is not None
            tokens[i] = request.stop_ids[0]
        return tokens


class SimulatedEngine(Unshared):
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
        lengths: tuple[float, float] = (200.0, 0.8),  # median in tokens, deviation of the logarithm
        version: int = 0,
    ) -> None:
        self.version = version
        self._numbers = {"": 0}  # of adapters, by name; a name keeps its own
        self._loaded: dict[str, int] = {}  # their versions
        self.tokens_generated = self.tokens_computed = 0
        self.busy_s = 0.0
        self.prefill_tokens_per_s = 0.0
        self.cache_bytes_per_token = 0  # there is none
        self.path, self.preempted = "simulated", 0
        self.tensor_parallel = 1
        self.vocab_size, self.max_length = vocab_size, max_length
        self._clock, self._rate, self._seed = clock, tokens_per_s, seed
        self._median, self._sigma = lengths
        self._logprob = np.float32(-math.log(vocab_size))
        self._slots = _SimulatedSlots(slots)
        self._queue: deque[Request] = deque()
        self._over: list[FlushPiece] = []  # what ended requests had not flushed
        # Earlier versions, of which adapter, and up to where.
        self._versions: list[tuple[int, int, NDArray[np.int64]]] = []
        self._now_s = clock.monotonic()  # up to which everything has been brought
        self._paused = self._asleep = False

    @property
    def running(self) -> int:
        return len(self._slots.slot_of)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def ended(self) -> bool:
        return bool(self._over)

    @property
    def due_s(self) -> float:
        if not self._slots.slot_of:
            return 0.0
        live = self._slots.ids >= 0
        next_s = self._slots.started_s + (self._slots.produced + 1) / self._rate
        return max(0.0, float(next_s[live].min()) - self._clock.monotonic())

    # -- requests --------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            check(request, self.vocab_size, self._loaded)
            if request.stop_text:
                raise Refused(
                    f"request {request.id} has stop texts, and this engine has no tokenizer",
                    where="engine",
                    fix="stop at token ids",
                )
        self._advance()
        known = self._slots.slot_of.keys() | {request.id for request in self._queue}
        for request in requests:
            if request.id in known:
                continue
            known.add(request.id)
            if request.max_new < 1 or len(request.tokens) >= self.max_length:
                self._over.append(_empty(request.id, Finish.LENGTH))
            else:
                self._queue.append(request)
        self._fill(self._now_s)

    def abort(self, ids: Iterable[int]) -> None:
        self._advance()
        gone = set(ids)
        waiting = [request.id for request in self._queue if request.id in gone]
        self._queue = deque(request for request in self._queue if request.id not in gone)
        self._over += [_empty(request_id, Finish.ABORTED) for request_id in waiting]
        for request_id in [i for i in self._slots.slot_of if i in gone]:
            self._end(self._slots.slot_of[request_id], Finish.ABORTED)
        self._fill(self._now_s)

    def release(self, sessions: Iterable[int]) -> None:
        """Sessions hold nothing here."""

    # -- time ------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Tokens that each of its slots could have brought while any of them was in use."""
        return int(self.busy_s * self._rate + _ROUNDING)

    def step(self) -> bool:
        self._advance()
        return not self._stands and bool(self._slots.slot_of or self._queue)

    @property
    def _stands(self) -> bool:
        return self._paused or self.version == NO_VERSION

    def pause(self) -> None:
        self._advance()
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._go_on()

    def _go_on(self) -> None:
        """No time has passed for what runs while it stood."""
        if self._stands:
            return
        now = self._clock.monotonic()
        self._slots.started_s += now - self._now_s
        self._slots.ends_s += now - self._now_s
        self._now_s = now

    def _advance(self) -> None:
        """Brings all tokens that are due; a slot that came free was used from that moment on."""
        if self._stands:
            return
        slots, now = self._slots, self._clock.monotonic()
        if slots.slot_of:
            self.busy_s += now - self._now_s
        while slots.slot_of and slots.ends_s[slot := int(slots.ends_s.argmin())] <= now:
            ended_s = float(slots.ends_s[slot])
            self._count(int(slots.length[slot] - slots.produced[slot]))
            slots.produced[slot] = slots.length[slot]
            self._end(slot, Finish(slots.finish[slot]))
            self._fill(ended_s)
        due = ((now - slots.started_s) * self._rate + _ROUNDING).astype(np.int64)
        reached = np.maximum(np.minimum(due, slots.length - 1), slots.produced)
        self._count(int((reached - slots.produced).sum()))
        slots.produced = reached
        self._now_s = now

    def _count(self, tokens: int) -> None:
        self.tokens_generated += tokens
        self.tokens_computed += tokens

    def _fill(self, at_s: float) -> None:
        while self._queue and self._slots.free:
            request = self._queue.popleft()
            cut = min(request.max_new, self.max_length - len(request.tokens))
            length = min(cut, self._drawn_length(request)) if request.stop_ids else cut
            finish = Finish.STOP if request.stop_ids and length < cut else Finish.LENGTH
            ends_s = at_s + length / self._rate
            about = request, at_s, ends_s, length, finish, self.vocab_size
            slot = self._slots.place(*about, self._numbers[request.adapter])
            for _, _, until in self._versions:
                until[slot] = 0
            self.tokens_computed += len(request.tokens)

    def _drawn_length(self, request: Request) -> int:
        key = np.array([key_of(request.seed ^ key_of(self._seed))], np.uint64)
        uniform = float(uniforms(key, np.array([len(request.tokens)]))[0])
        return max(1, round(self._median * math.exp(self._sigma * NORMAL.inv_cdf(uniform))))

    # -- weights ---------------------------------------------------------------------------------

    def swap(self, state: Mapping[str, Tensor], version: int) -> None:
        """It computes with no tensor, but it wants all of them, as others do."""
        self._advance()
        with replacing(version, self.quarantine):
            for name in state:
                state[name]
        self._enter(version)
        self._go_on()

    def _enter(self, version: int) -> None:
        self._versions.append((0, self.version, self._slots.produced.copy()))
        self.version = version

    @property
    def adapters(self) -> Mapping[str, int]:
        return dict(self._loaded)

    def load_adapter(
        self, name: str, tensors: Mapping[str, Tensor], scale: float, version: int
    ) -> None:
        self._advance()
        for factor in tensors:
            tensors[factor]
        number = self._numbers.setdefault(name, len(self._numbers))
        if name in self._loaded:
            self._versions.append((number, self._loaded[name], self._slots.produced.copy()))
        self._loaded[name] = version

    def quarantine(self) -> None:
        self._advance()
        self._enter(NO_VERSION)

    def unload_adapter(self, name: str) -> None:
        self._advance()
        requests = [r for r in self._slots.requests if r is not None]
        if any(request.adapter == name for request in [*requests, *self._queue]):
            raise in_use(name)
        self._loaded.pop(name, None)

    def sleep(self) -> None:
        self._asleep = True
        self.pause()

    def wake(self, state: Mapping[str, Tensor], version: int) -> None:
        self.swap(state, version)
        if self._asleep:
            self._asleep = False
            self.resume()

    def score(self, tokens: Ints, adapter: str = "") -> NDArray[np.float32]:
        if self.version == NO_VERSION:
            raise no_weights()
        return np.full(len(tokens) - 1, self._logprob, np.float32)

    # -- what has come ---------------------------------------------------------------------------

    def drain(self, ended_only: bool = False) -> Flush | None:
        over, self._over = flush_of(self._over), []
        if ended_only:
            return over
        growth = self._growth(np.flatnonzero(self._slots.produced > self._slots.flushed))
        self._versions.clear()
        if over is None or growth is None:
            return over or growth
        return joined(over, growth)

    def _growth(self, live: NDArray[np.int64]) -> Flush | None:
        """What slots have produced since they were flushed."""
        if not len(live):
            return None
        slots = self._slots
        start, counts = slots.flushed[live], slots.produced[live] - slots.flushed[live]
        total = int(counts.sum())
        rows = np.repeat(live, counts)
        places = np.arange(total) + np.repeat(start - (np.cumsum(counts) - counts), counts)
        loaded = [self._loaded.get(name, -1) if name else self.version for name in self._numbers]
        adapters = slots.adapter[rows]
        versions = np.array(loaded, np.int32)[adapters]
        for adapter, version, until in reversed(self._versions):
            versions[(adapters == adapter) & (places < until[rows])] = version
        slots.flushed[live] = slots.produced[live]
        logprobs = np.full(total, self._logprob, np.float32)
        asked = slots.unmodified[rows]
        nan = np.float32(np.nan)
        return Flush(
            ids=slots.ids[live],
            counts=counts.astype(np.int32),
            tokens=slots.tokens(rows, places).astype(np.int32),
            logprobs=logprobs,
            unmodified=np.where(asked, logprobs, nan) if asked.any() else NO_FLOATS,
            versions=versions,
            finish=np.full(len(live), Finish.RUNNING, np.int8),
        )

    def _end(self, slot: int, code: Finish) -> None:
        """Takes the request out of its slot, with what it has not flushed."""
        rest = None
        if self._slots.produced[slot] > self._slots.flushed[slot]:
            rest = self._growth(np.array([slot]))
        asked = bool(self._slots.unmodified[slot])
        request = self._slots.clear(slot)
        if rest is None:
            self._over.append(_empty(request.id, code))
            return
        unmodified = rest.unmodified if asked else None
        piece = FlushPiece(request.id, rest.tokens, rest.logprobs, rest.versions, code, unmodified)
        self._over.append(piece)


def _empty(request_id: int, code: Finish) -> FlushPiece:
    none = np.zeros(0, np.int32)
    return FlushPiece(request_id, none, NO_FLOATS, none, code)
