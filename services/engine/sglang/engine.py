"""The engine whose requests an SGLang server runs: hands requests over, brings tokens back.

The server decodes whether or not anybody looks; `step` takes what has come. Requests beyond its
slots wait here, so that an abort, a pause or new weights find a server that holds only what runs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.api.engine import Finish
from common.clock import Clock, SystemClock
from common.errors import Damaged, MeshError, Refused
from common.generation.builtin.stop_text import StopText
from common.generation.builtin.weights import check_shapes, shapes_of
from common.generation.contract import (
    NO_VERSION,
    Flush,
    Ints,
    Piece,
    Request,
    Unshared,
    check,
    flush_of,
    replacing,
)
from common.generation.served_by_sglang import known_rows
from common.model.config import ModelConfig
from common.model.hf import state_to_hf
from services.engine.sglang import v0_5
from services.engine.sglang.adapters import ServerAdapters
from services.engine.sglang.control import IN_PLACE, RETRACT, Control
from services.engine.sglang.http import Http, Pending
from services.engine.sglang.requests import Decode, Sent

ARRIVAL_S = 0.01  # a step waits this long for tokens
SCORE_S = 60.0
ABORT_S = 3.0  # for the last tokens of an aborted request
ABORT_AGAIN_S = 0.3  # an abort that overtakes its request is not heard

log = logging.getLogger(__name__)


class SGLangEngine(Unshared):
    """See `TokenEngine`. It sleeps until `wake` brings the first weights."""

    def __init__(
        self,
        http: Http,
        control: Control,
        config: ModelConfig,
        slots: int,
        max_length: int,
        *,
        kv_on_update: str = "keep",
        seeded: bool = False,
        decode: Decode | None = None,
        clock: Clock | None = None,
        path: str = "sglang",
        tensor_parallel: int = 1,
        adapters: bool = False,
        read_back: bool = False,
    ) -> None:
        """`adapters`: the server was started for them. `read_back`: what it computes with is
        compared with each version that was put in place, and is Damaged where it differs.
        """
        self.path, self.tensor_parallel = path, tensor_parallel
        self.version = NO_VERSION
        self.steps = self.tokens_generated = self.tokens_computed = self.preempted = 0
        self.tokens_cached = 0  # that its server found, on whatever tier of its own
        self.relabelled = 0  # tokens that were handed on under another version than they are of
        self.busy_s = 0.0
        self.due_s = 0.0
        self.prefill_tokens_per_s = 0.0  # not to be told apart from what it decodes meanwhile
        self.cache_bytes_per_token = 0  # it cannot be moved
        self._http, self._control = http, control
        self._config, self._shapes = config, shapes_of(config)
        ranks = tensor_parallel if adapters else 0
        self._adapters = ServerAdapters(http, config, ranks, on_cpu=control.on_cpu)
        self._read_back = read_back
        self._slots, self._max_length = slots, max_length
        self._recompute = kv_on_update == "recompute"
        self._seeded, self._decode = seeded, decode
        self._clock = clock or SystemClock()
        self._stop_text = StopText(decode)
        self._arrived: SimpleQueue[tuple[str, dict[str, Any] | Exception | None]] = SimpleQueue()
        self._queue: dict[int, Request] = {}  # waiting, by id, in order
        self._sent: dict[str, Sent] = {}  # at the server, by rid
        self._rids: dict[int, str] = {}
        self._over: list[Piece] = []  # ended, not drained
        self._start = os.urandom(4).hex()
        self._numbers = itertools.count()
        self._paused, self._asleep = False, True

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
        self._control.check_alive()
        for request in requests:
            check(request, self._config.ids_end, self._adapters.loaded)
            self._stop_text.check(request)
            v0_5.check_sampling(request, self._config.ids_end, self._seeded)
        for request in requests:
            if request.id in self._queue or request.id in self._rids:
                continue
            if request.max_new < 1 or len(request.tokens) >= self._max_length:
                self._end_unsent(request.id, Finish.LENGTH)
            elif self._stop_text.met(request):
                self._end_unsent(request.id, Finish.STOP)
            else:
                self._queue[request.id] = request
        self._fill()

    def abort(self, ids: Iterable[int]) -> None:
        for request_id in ids:
            if self._queue.pop(request_id, None):
                self._end_unsent(request_id, Finish.ABORTED)
            elif rid := self._rids.get(request_id):
                sent = self._sent[rid]
                sent.abort_by_s = self._clock.monotonic() + ABORT_S
                self._ask_abort(sent)
                if self._control.stands:  # all that it generated has come; nothing more would
                    self._hang_up(sent)

    def release(self, sessions: Iterable[int]) -> None:
        """The server's cache is its own affair: it drops what was used longest ago."""

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
            sent.adapter = self._adapters.loaded.get(request.adapter)
            self._sent[sent.rid] = sent
            self._rids[request.id] = sent.rid
            # By update too: a new lineage gives the same numbers to other weights.
            cache = f"w:{self.version}.{self._control.updates}"
            adapter = sent.adapter.there if sent.adapter is not None else ""
            about = request, most, sent.rid, cache + adapter, self._config.ids_end
            body = v0_5.generate(*about, adapter)
            sent.stream = self._http.stream(v0_5.GENERATE, body, partial(self._put, sent.rid))

    def _put(self, rid: str, event: dict[str, Any] | Exception | None) -> None:
        """Hands over an event of a stream, its error, or None at its end; runs on the loop."""
        self._control.heard()
        self._arrived.put((rid, event))

    @property
    def _halted(self) -> bool:
        return self._paused or self._asleep or self.version == NO_VERSION

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> bool:
        self._control.check_alive()
        if self._halted:
            self._take(0.0)
            return False
        self._go()  # where a pause or an update failed before it was over
        self._fill()
        if not self._sent:
            self._take(0.0)
            return False
        began = self._clock.monotonic()
        self._take(ARRIVAL_S)
        self._press_aborts()
        self._sweep_adapters()
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
            self._end(sent, Finish.ABORTED, repr(event) if event else "its stream ended early")
            return 0
        chunk = v0_5.chunk(event, len(sent.tokens), v0_5.plain(sent.request))
        before = len(sent.tokens)
        sent.add(chunk)
        self.tokens_computed += chunk.computed + len(chunk.tokens)
        self.tokens_cached += chunk.cached
        self.relabelled += sent.settle_versions(chunk.spans)
        self.preempted += max(0, chunk.retractions - sent.retractions)
        sent.retractions = max(sent.retractions, chunk.retractions)
        finish = chunk.finish
        if self._completes(sent, len(chunk.tokens)):
            finish = Finish.STOP
            if chunk.finish == Finish.RUNNING:
                self._ask_abort(sent)
                sent.hang_up()
        brought = len(sent.tokens) - before
        self.tokens_generated += brought
        if finish != Finish.RUNNING:
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
                self._hang_up(sent)
            elif now - sent.asked_s >= ABORT_AGAIN_S:
                self._ask_abort(sent)

    def _ask_abort(self, sent: Sent) -> Pending[None]:
        sent.asked_s = self._clock.monotonic()
        return self._http.begin("POST", v0_5.ABORT, {"rid": sent.rid}, deadline_s=ABORT_S)

    def _hang_up(self, sent: Sent) -> None:
        """Ends here what the server has not ended: it aborts a request that nobody listens to."""
        sent.hang_up()
        self._end(sent, Finish.ABORTED)

    def _end(self, sent: Sent, finish: Finish, reason: str = "") -> None:
        del self._sent[sent.rid]
        del self._rids[sent.request.id]
        piece = sent.take(finish)
        assert piece is not None
        self._over.append(piece)
        if reason:
            log.warning("request %d was ended by SGLang: %s", sent.request.id, reason)

    def _end_unsent(self, request_id: int, finish: Finish) -> None:
        none = np.zeros(0, np.int32)
        self._over.append(Piece(request_id, none, none.astype(np.float32), none, finish))

    # -- pauses and weights ----------------------------------------------------------------------

    def pause(self) -> None:
        if not self._halted:
            self._halt(RETRACT)
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._go()

    def sleep(self) -> None:
        if not self._asleep:
            self._halt(RETRACT)
            self._asleep = True
            self._control.release()

    def swap(self, state: Mapping[str, Tensor], version: int) -> None:
        """What runs goes on under the new weights: with its cache where `kv_on_update` is keep,
        else it is computed again. What has no token yet starts again, under the new key."""
        self._control.check_alive()
        check_shapes(state, self._shapes)
        if self._asleep:
            self.version = version
            return
        # The version of an adapter stays, so its tokens would not tell of a cache of another base.
        beside = any(sent.adapter is not None for sent in self._sent.values())
        self._halt(RETRACT if self._recompute or beside else IN_PLACE)
        self._load(state, version)

    def wake(self, state: Mapping[str, Tensor], version: int) -> None:
        if not self._asleep:
            self.swap(state, version)
            return
        self._control.check_alive()
        check_shapes(state, self._shapes)
        self._halt(RETRACT)
        self._control.regain()
        self._asleep = False
        self._load(state, version)

    @property
    def adapters(self) -> Mapping[str, int]:
        return self._adapters.versions

    def load_adapter(
        self, name: str, tensors: Mapping[str, Tensor], scale: float, version: int
    ) -> None:
        """What runs goes on with the version that it began with."""
        self._control.check_alive()
        self._adapters.load(name, tensors, scale, version)
        self._sweep_adapters()

    def unload_adapter(self, name: str) -> None:
        in_work = [*self._queue.values(), *(sent.request for sent in self._sent.values())]
        if any(request.adapter == name for request in in_work):
            raise Refused(
                f"adapter {name!r} is in use", where="engine", fix="abort its requests first"
            )
        self._adapters.unload(name)
        self._sweep_adapters()

    def _sweep_adapters(self) -> None:
        used = (sent.adapter.there for sent in self._sent.values() if sent.adapter is not None)
        self._adapters.sweep(used)

    def _halt(self, mode: str) -> None:
        self._control.halt(mode)
        self._take(0.0)

    def _go(self) -> None:
        if not self._halted:
            self._control.go()
            self._fill()

    def _load(self, state: Mapping[str, Tensor], version: int) -> None:
        self._take_back()
        theirs = known_rows(self._config, state_to_hf(self._config, state))
        with replacing(version, self.quarantine):
            left_s, config = self._control.put(theirs, version), self._config
            if self._read_back and (odd := self._control.differing(config, theirs, left_s)):
                raise Damaged(f"{len(odd)} tensors are not what was put there: {odd[0]}")
        self.version = version
        self._go()

    def quarantine(self) -> None:
        """The server stands, and stays so: see `_go`. One that cannot be told to may go on, so that
        what it works on ends here: it is asked for again where there is a whole version.
        """
        self.version = NO_VERSION
        if self._control.stands:
            return
        try:
            self._halt(RETRACT)
        except MeshError:
            for sent in list(self._sent.values()):
                self._hang_up(sent)

    def _take_back(self) -> None:
        """What has no token yet: its cache would be of other weights than its key."""
        untouched = [sent for sent in self._sent.values() if not sent.tokens]
        for sent in untouched:
            del self._sent[sent.rid]
            del self._rids[sent.request.id]
            self._ask_abort(sent)
            sent.hang_up()
            if sent.abort_by_s is not None:
                self._end_unsent(sent.request.id, Finish.ABORTED)
        back = {s.request.id: s.request for s in untouched if s.abort_by_s is None}
        self._queue = back | self._queue

    # -- scores ----------------------------------------------------------------------------------

    def score(self, tokens: Ints, adapter: str = "") -> NDArray[np.float32]:
        row = np.asarray(tokens, np.int32)
        asked = Request(-1, row, 0, 1.0, (), 0, -1, adapter=adapter)
        check(asked, self._config.ids_end, self._adapters.loaded)
        self._control.check_alive()
        if self._halted:
            raise Refused("the engine rests", where="engine", fix="resume or wake it first")
        if len(row) > self._max_length:
            raise Refused(
                f"{len(row)} tokens are more than a slot of {self._max_length} holds",
                where="engine",
                fix="raise rollout.max_tokens",
            )
        rid = f"{self._start}{next(self._numbers):010d}"
        there = self._adapters.loaded[adapter].there if adapter else ""
        body = v0_5.score(row.tolist(), rid, there)
        return v0_5.scores(self._http.call("POST", v0_5.GENERATE, body, deadline_s=SCORE_S))

    def close(self) -> None:
        """Leaves the server as it was found, unless that has ended; who started it stops it."""
        self._queue.clear()
        with contextlib.suppress(MeshError):
            asked = [self._ask_abort(sent) for sent in self._sent.values()]
            for answer in asked:
                self._http.result(answer, v0_5.ABORT, ABORT_S)
        self._sent.clear()
        with contextlib.suppress(MeshError):
            self._control.close()
