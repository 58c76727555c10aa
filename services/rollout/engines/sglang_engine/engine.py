"""SGLang as an engine: requests to a server that runs by itself, its tokens back, its weights.

The server decodes whether or not anybody looks; `step` takes what has come. Requests beyond its
slots wait here, so that an abort, a pause or new weights find a server that holds only what runs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.clock import Clock, SystemClock
from common.errors import MeshError, Refused
from common.model.config import ModelConfig
from common.model.hf import state_to_hf
from services.rollout.engines.base import (
    ABORTED,
    LENGTH,
    RUNNING,
    STOP,
    WHOLE_BYTES,
    Flush,
    Ints,
    Piece,
    Request,
    SessionCache,
    check,
    flush_of,
)
from services.rollout.engines.sglang_engine import v0_5
from services.rollout.engines.sglang_engine.health import Watch
from services.rollout.engines.sglang_engine.http import Answer, Http
from services.rollout.engines.sglang_engine.requests import Decode, Sent
from services.rollout.engines.sglang_engine.shapes import check_state, shapes_of
from services.rollout.engines.sglang_engine.weights import Transport
from services.rollout.engines.torch_engine.stoptext import StopText

ARRIVAL_S = 0.01  # a step waits this long for tokens
CONTROL_S = 20.0  # for an answer of the scheduler, which ends the step it is in first
SCORE_S = 60.0
UPDATE_S = 50.0  # for new weights; the service that asks waits 60
ABORT_S = 3.0  # for the last tokens of an aborted request
ABORT_AGAIN_S = 0.3  # an abort that overtakes its request is not heard


class Quarantined(MeshError):
    """An update of weights failed half-way: nobody knows what the server holds, so it serves no
    more."""

    code = "engine_quarantined"


class SGLangEngine:
    """See `Engine`. It sleeps until `wake` brings the first weights."""

    def __init__(
        self,
        http: Http,
        watch: Watch,
        transport: Transport,
        config: ModelConfig,
        slots: int,
        max_length: int,
        *,
        kv_on_update: str = "keep",
        seeded: bool = False,
        on_cpu: bool = True,
        decode: Decode | None = None,
        clock: Clock | None = None,
        update_s: float = UPDATE_S,
        path: str = "sglang",
    ) -> None:
        self.path = path
        self.version = -1
        self.steps = self.tokens_generated = self.tokens_computed = self.preempted = 0
        self.relabelled = 0  # tokens that were handed on under another version than they are of
        self.busy_s = 0.0
        self.due_s = 0.0
        self.prefill_tokens_per_s = 0.0  # not to be told apart from what it decodes meanwhile
        self.cache_bytes_per_token = 0  # it cannot be moved
        self._http, self._watch, self._transport = http, watch, transport
        self._config, self._shapes = config, shapes_of(config)
        self._slots, self._max_length = slots, max_length
        self._recompute = kv_on_update == "recompute"
        self._seeded, self._on_cpu, self._decode = seeded, on_cpu, decode
        self._clock = clock or SystemClock()
        self._update_s = update_s
        self._stop_text = StopText(decode)
        self._arrived: SimpleQueue[tuple[str, dict[str, Any] | Exception | None]] = SimpleQueue()
        self._queue: dict[int, Request] = {}  # waiting, by id, in order
        self._sent: dict[str, Sent] = {}  # at the server, by rid
        self._rids: dict[int, str] = {}
        self._over: list[Piece] = []  # ended, not drained
        self._start = os.urandom(4).hex()
        self._numbers = itertools.count()
        self._paused, self._asleep, self._released = False, True, False
        self._stands = ""  # how the server itself is paused: retract, in_place; empty: it is not
        self._updates = 0
        self._failed: MeshError | None = None

    @property
    def running(self) -> int:
        return len(self._sent)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def ended(self) -> bool:
        return bool(self._over)

    # -- requests --------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        self._check_alive()
        for request in requests:
            check(request, self._config.vocab_size)
            self._stop_text.check(request)
            v0_5.check_sampling(request, self._config.vocab_size, self._seeded)
        for request in requests:
            if request.id in self._queue or request.id in self._rids:
                continue
            if request.max_new < 1 or len(request.tokens) >= self._max_length:
                self._end_unsent(request.id, LENGTH)
            elif self._stop_text.met(request):
                self._end_unsent(request.id, STOP)
            else:
                self._queue[request.id] = request
        self._fill()

    def abort(self, ids: Iterable[int]) -> None:
        for request_id in ids:
            if self._queue.pop(request_id, None):
                self._end_unsent(request_id, ABORTED)
            elif rid := self._rids.get(request_id):
                sent = self._sent[rid]
                sent.abort_by_s = self._clock.monotonic() + ABORT_S
                self._ask_abort(sent)
                if self._stands:  # all that it generated has come; nothing more would
                    self._end(sent, ABORTED)

    def release(self, sessions: Iterable[int]) -> None:
        """The server's cache is its own affair: it drops what was used longest ago."""

    def export(
        self, session: int, start: int = 0, most_bytes: int = WHOLE_BYTES
    ) -> SessionCache | None:
        return None

    def adopt(self, session: int, cache: SessionCache) -> bool:
        return False

    def drain(self, ended_only: bool = False) -> Flush | None:
        pieces, self._over = self._over, []
        if not ended_only:
            pieces += [piece for sent in self._sent.values() if (piece := sent.take())]
        return flush_of(pieces)

    def _fill(self) -> None:
        while self._queue and len(self._sent) < self._slots and not self._halted:
            request = self._queue.pop(next(iter(self._queue)))
            most = min(request.max_new, self._max_length - len(request.tokens))
            sent = Sent(request, f"{self._start}{next(self._numbers):010d}", most)
            self._sent[sent.rid] = sent
            self._rids[request.id] = sent.rid
            # By update too: a new lineage gives the same numbers to other weights.
            cache = f"w:{self.version}.{self._updates}"
            body = v0_5.generate(request, most, sent.rid, cache, self._config.vocab_size)
            came = partial(self._put, sent.rid)
            sent.stream = self._http.stream(v0_5.GENERATE, body, came, came)

    def _put(self, rid: str, event: dict[str, Any] | Exception | None) -> None:
        """On the thread that reads: an event of a stream, its error, or None at its end."""
        self._watch.alive()
        self._arrived.put((rid, event))

    @property
    def _halted(self) -> bool:
        return self._paused or self._asleep

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> bool:
        self._check_alive()
        if self._halted:
            self._take(0.0)
            return False
        self._fill()
        if not self._sent:
            self._take(0.0)
            return False
        began = self._clock.monotonic()
        self._take(ARRIVAL_S)
        self._press_aborts()
        self._fill()
        self.busy_s += self._clock.monotonic() - began
        return bool(self._sent)

    def _take(self, wait_s: float) -> None:
        """Everything that has come, after waiting for something."""
        came: Counter[str] = Counter()
        try:
            rid, event = self._arrived.get(timeout=wait_s) if wait_s else self._arrived.get_nowait()
            while True:
                came[rid] += self._hear(rid, event)
                rid, event = self._arrived.get_nowait()
        except Empty:
            # The server does not say what it did in one step: at least this many brought it.
            self.steps += max(came.values(), default=0)

    def _hear(self, rid: str, event: dict[str, Any] | Exception | None) -> int:
        """How many tokens it brings."""
        sent = self._sent.get(rid)
        if sent is None:  # it has ended here
            return 0
        if not isinstance(event, dict):
            self._end(sent, ABORTED, repr(event) if event else "its stream ended early")
            return 0
        chunk = v0_5.chunk(event, len(sent.tokens))
        before = len(sent.tokens)
        sent.add(chunk)
        self.tokens_computed += chunk.computed + len(chunk.tokens)
        self.relabelled += sent.settle_versions(chunk.spans)
        self.preempted += max(0, chunk.retractions - sent.retractions)
        sent.retractions = max(sent.retractions, chunk.retractions)
        finish = chunk.finish
        if self._completes(sent, len(chunk.tokens)):
            finish = STOP
            if chunk.finish == RUNNING:
                self._ask_abort(sent)
        brought = len(sent.tokens) - before
        self.tokens_generated += brought
        if finish != RUNNING:
            self._end(sent, finish, chunk.reason if sent.abort_by_s is None else "")
        return brought

    def _completes(self, sent: Sent, came: int) -> bool:
        """Whether one of its new tokens completes a stop text; it is the last then."""
        if not sent.request.stop_text or self._decode is None:
            return False
        return sent.cut_at_text(self._decode, came)

    def _press_aborts(self) -> None:
        """Asks again for what has not ended, and ends here what the server does not answer for."""
        now = self._clock.monotonic()
        for sent in [s for s in self._sent.values() if s.abort_by_s is not None]:
            if now >= (sent.abort_by_s or 0.0):
                self._end(sent, ABORTED)
            elif now - sent.asked_s >= ABORT_AGAIN_S:
                self._ask_abort(sent)

    def _ask_abort(self, sent: Sent) -> Answer[None]:
        sent.asked_s = self._clock.monotonic()
        return self._http.begin("POST", v0_5.ABORT, {"rid": sent.rid}, deadline_s=ABORT_S)

    def _end(self, sent: Sent, finish: int, reason: str = "") -> None:
        del self._sent[sent.rid]
        del self._rids[sent.request.id]
        piece = sent.take(finish)
        assert piece is not None
        self._over.append(piece)
        if reason:
            self._watch.complain(f"request {sent.request.id} ended by SGLang: {reason}")

    def _end_unsent(self, request_id: int, finish: int) -> None:
        none = np.zeros(0, np.int32)
        self._over.append(Piece(request_id, none, none.astype(np.float32), none, finish))

    # -- pauses ----------------------------------------------------------------------------------

    def pause(self) -> None:
        if not self._halted:
            self._halt("retract")
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._go()

    def sleep(self) -> None:
        """A server that holds requests would die of releasing its memory: they are retracted."""
        if self._asleep:
            return
        self._halt("retract")
        self._asleep = self._released = True
        self._control(v0_5.RELEASE, {})

    def _halt(self, mode: str) -> None:
        """The server stands, and everything it generated before has come."""
        self._control(v0_5.PAUSE, {"mode": mode})
        self._stands = mode
        # The pause is not acknowledged. The scheduler answers these in its turn, behind the pause
        # and the tokens before it, by the way that tokens take.
        for _ in range(2):
            self._http.call("GET", v0_5.INFO, deadline_s=CONTROL_S)
        self._take(0.0)

    def _go(self) -> None:
        if self._stands and not self._halted:
            self._control(v0_5.CONTINUE, {"torch_empty_cache": not self._on_cpu})
            self._stands = ""
            self._fill()

    def _control(self, path: str, body: dict[str, Any]) -> None:
        with self._watch.grace():
            self._http.call("POST", path, body, deadline_s=CONTROL_S)

    # -- weights ---------------------------------------------------------------------------------

    def swap(self, state: Mapping[str, Tensor], version: int) -> None:
        """What runs goes on under the new weights: with its cache where `kv_on_update` is keep,
        else it is computed again. What has no token yet starts again, under the new key."""
        self._check_alive()
        check_state(state, self._shapes)
        if self._asleep:
            self.version = version
            return
        if not self._stands:
            self._halt("retract" if self._recompute else "in_place")
        self._send_again()
        self._put_weights(state, version)
        self._go()

    def wake(self, state: Mapping[str, Tensor], version: int) -> None:
        self._check_alive()
        check_state(state, self._shapes)
        if not self._asleep:
            self.swap(state, version)
            return
        if not self._stands:
            self._halt("retract")
        if self._released:
            self._control(v0_5.RESUME, {})
            self._released = False
        self._send_again()
        self._put_weights(state, version)
        self._asleep = False
        self._go()

    def _send_again(self) -> None:
        """Takes back what has no token yet: its cache would be of other weights than its key."""
        untouched = [sent for sent in self._sent.values() if not sent.tokens]
        for sent in untouched:
            del self._sent[sent.rid]
            del self._rids[sent.request.id]
            self._ask_abort(sent)
            if sent.stream is not None:
                sent.stream.cancel()
            if sent.abort_by_s is not None:
                self._end_unsent(sent.request.id, ABORTED)
        back = {s.request.id: s.request for s in untouched if s.abort_by_s is None}
        self._queue = back | self._queue

    def _put_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        theirs = state_to_hf(self._config, state)
        flush = self._stands == "retract"  # what runs in place still needs its cache
        try:
            with self._watch.grace():
                self._transport.push(theirs, version, flush, self._update_s)
        except (MeshError, OSError) as error:
            self._failed = Quarantined(
                f"version {version} did not arrive whole: {error}",
                where=self._http.url,
                fix="the engine's process ends and starts with a whole version",
            )
            raise self._failed from error
        self.version = version
        self._updates += 1

    def _check_alive(self) -> None:
        """Raises when the server has ended, does not answer, or holds nobody knows what."""
        if self._failed is None:
            self._failed = self._watch.failure()
        if self._failed is not None:
            raise self._failed

    # -- scores ----------------------------------------------------------------------------------

    def score(self, tokens: Ints) -> NDArray[np.float32]:
        row = np.asarray(tokens, np.int32)
        check(Request(-1, row, 0, 1.0, (), 0, -1), self._config.vocab_size)
        self._check_alive()
        if self._halted:
            raise Refused("the engine rests", where="engine", fix="resume or wake it first")
        if len(row) > self._max_length:
            raise Refused(
                f"{len(row)} tokens are more than a slot of {self._max_length} holds",
                where="engine",
                fix="raise rollout.max_tokens",
            )
        rid = f"{self._start}{next(self._numbers):010d}"
        body = v0_5.score(row.tolist(), rid)
        return v0_5.scores(self._http.call("POST", v0_5.GENERATE, body, deadline_s=SCORE_S))

    def close(self) -> None:
        """Leaves the server as it was found, unless that has ended; who started it stops it."""
        self._watch.close()
        self._queue.clear()
        with contextlib.suppress(MeshError):
            if self._released:
                self._control(v0_5.RESUME, {})
            asked = [self._ask_abort(sent) for sent in self._sent.values()]
            for answer in asked:
                self._http.result(answer, v0_5.ABORT, ABORT_S)
            self._paused = self._asleep = False
            self._go()
        self._sent.clear()
        self._transport.close()
