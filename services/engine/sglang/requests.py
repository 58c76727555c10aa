"""The requests that a server works on, and what this side knows of each."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue

import numpy as np

from meshrl.common.api.engine import Finish
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import MeshError
from meshrl.common.generation.builtin.stop_text import MARGIN, StopText, begin_of
from meshrl.common.generation.contract import Flush, FlushPiece, Request, flush_of
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.adapters import LoadedAdapter
from meshrl.services.engine.sglang.http import Http, Pending, ServerEvent

ABORT_S = 3.0  # for the last tokens of an aborted request
ABORT_AGAIN_S = 0.3  # an abort that overtakes its request is not heard

Decode = Callable[[Sequence[int]], str]
log = logging.getLogger(__name__)


@dataclass(slots=True)
class SentRequest:
    """A request at the server: what has come of it, and what of that has not been drained."""

    request: Request
    rid: str
    most: int  # tokens that it may generate
    stream: Pending[None] | None = None
    tokens: list[int] = field(default_factory=list)  # all that came
    logprobs: list[float] = field(default_factory=list)
    unmodified: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    drained: int = 0
    retractions: int = 0  # how often it gave up its cache
    abort_by_s: float | None = None  # asked to end: without an answer by then it ends here
    adapter: LoadedAdapter | None = None  # that it computes with, beside the base
    asked_s: float = 0.0  # when the server was last asked to abort it

    def hang_up(self) -> None:
        if self.stream is not None:
            self.stream.cancel()

    def add(self, chunk: v0_5.StreamChunk) -> None:
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self.unmodified += chunk.unmodified
        version = chunk.version if self.adapter is None else self.adapter.version
        self.versions += [version] * len(chunk.tokens)

    def settle_versions(self, spans: Sequence[tuple[int, int, int]]) -> int:
        """Takes what the server says of all tokens at the end; how many had been told otherwise
        and are drained already."""
        wrong = 0
        if self.adapter is not None:  # spans are of the base
            return 0
        for version, start, end in spans:
            for place in range(start, min(end, len(self.versions))):
                wrong += self.versions[place] != version and place < self.drained
                self.versions[place] = version
        return wrong

    def cut_at_text(self, decode: Decode, came: int) -> bool:
        """Leaves out what follows the token that completes a stop text; `came` are new."""
        texts = self.request.stop_text
        longest = max(len(text.encode()) for text in texts)  # a token is a byte at least
        window = longest + MARGIN
        begin = begin_of(self.request)
        given = self.request.tokens[max(begin, len(self.request.tokens) - window) :].tolist()
        known = [*given, *self.tokens[-(window + came) :]] if came else []
        for back in range(came - 1, -1, -1):
            end = len(known) - back
            text = decode(known[max(0, end - window) : end])
            if any(stop in text for stop in texts):
                for column in (self.tokens, self.logprobs, self.unmodified, self.versions):
                    del column[len(column) - back :]
                return True
        return False

    def take(self, finish: Finish = Finish.RUNNING) -> FlushPiece | None:
        """What has come since the last call; None if that is nothing and it goes on."""
        part = slice(self.drained, len(self.tokens))
        if part.start == part.stop and finish == Finish.RUNNING:
            return None
        self.drained = len(self.tokens)
        asked = self.request.unmodified
        return FlushPiece(
            self.request.id,
            np.array(self.tokens[part], np.int32),
            np.array(self.logprobs[part], np.float32),
            np.array(self.versions[part], np.int32),
            finish,
            np.array(self.unmodified[part], np.float32) if asked else None,
        )


class Requests:
    """The requests of one server: those that wait here, those that it works on, those that have
    ended. At most `slots` are at the server.
    """

    def __init__(
        self,
        http: Http,
        ids_end: int,
        slots: int,
        max_length: int,
        decode: Decode | None,
        clock: Clock,
    ) -> None:
        """`ids_end`: the end of the token ids that may be sampled."""
        self.steps = self.tokens_generated = self.tokens_computed = self.preempted = 0
        self.tokens_cached = 0  # that its server found, on whatever tier of its own
        self.relabelled = 0  # tokens that were handed on under another version than they are of
        self.waiting: dict[int, Request] = {}  # by id, in order
        self.sent: dict[str, SentRequest] = {}  # at the server, by rid
        self.stop_text, self.max_length = StopText(decode), max_length
        self.ids_end, self.clock = ids_end, clock
        self._http, self._slots, self._decode = http, slots, decode
        self._arrived: SimpleQueue[tuple[str, ServerEvent | Exception | None]] = SimpleQueue()
        self._rids: dict[int, str] = {}
        self._over: list[FlushPiece] = []  # ended, not drained
        self._start = os.urandom(4).hex()
        self._numbers = itertools.count()

    @property
    def ended(self) -> bool:
        return bool(self._over)

    def new_rid(self) -> str:
        """A name for a request, unlike all others at the server."""
        return f"{self._start}{next(self._numbers):010d}"

    def add(self, request: Request) -> None:
        """Has a request wait, or ends it where there is nothing to generate; one that is in work
        is left alone.
        """
        if request.id in self.waiting or request.id in self._rids:
            return
        if request.max_new < 1 or len(request.tokens) >= self.max_length:
            self._end_unsent(request.id, Finish.LENGTH)
        elif self.stop_text.met(request):
            self._end_unsent(request.id, Finish.STOP)
        else:
            self.waiting[request.id] = request

    def abort(self, ids: Iterable[int], stands: bool) -> None:
        """Ends requests; of a server that `stands` nothing more would come of them."""
        for request_id in ids:
            if self.waiting.pop(request_id, None):
                self._end_unsent(request_id, Finish.ABORTED)
            elif rid := self._rids.get(request_id):
                sent = self.sent[rid]
                sent.abort_by_s = self.clock.monotonic() + ABORT_S
                self._ask_abort(sent)
                if stands:  # all that it generated has come
                    self._hang_up(sent)

    def drain(self, ended_only: bool = False) -> Flush | None:
        pieces, self._over = self._over, []
        if not ended_only:
            pieces += [piece for sent in self.sent.values() if (piece := sent.take())]
        return flush_of(pieces)

    def fill(
        self, cache: str, adapters: Mapping[str, LoadedAdapter], heard: Callable[[], None]
    ) -> None:
        """Gives the server what it has room for. `cache` names the weights that what it computes
        is of; `heard` is called on the loop when the server has said something.
        """
        while self.waiting and len(self.sent) < self._slots:
            request = self.waiting.pop(next(iter(self.waiting)))
            most = min(request.max_new, self.max_length - len(request.tokens))
            sent = SentRequest(request, self.new_rid(), most)
            sent.adapter = adapters.get(request.adapter)
            self.sent[sent.rid] = sent
            self._rids[request.id] = sent.rid
            adapter = sent.adapter.there if sent.adapter is not None else ""
            about = request, most, sent.rid, cache + adapter, self.ids_end
            body = v0_5.generate(*about, adapter)
            put = partial(self._put, sent.rid, heard)
            sent.stream = self._http.stream(v0_5.GENERATE, body, put)

    def _put(
        self, rid: str, heard: Callable[[], None], event: ServerEvent | Exception | None
    ) -> None:
        """Hands over an event of a stream, its error, or None at its end; runs on the loop."""
        heard()
        self._arrived.put((rid, event))

    # -- what has come ---------------------------------------------------------------------------

    def take(self, wait_s: float) -> None:
        came: Counter[str] = Counter()
        try:
            rid, event = self._arrived.get(timeout=wait_s) if wait_s else self._arrived.get_nowait()
            while True:
                came[rid] += self._hear(rid, event)
                rid, event = self._arrived.get_nowait()
        except Empty:
            # The server does not say what it did in one step: at least this many brought it.
            self.steps += max(came.values(), default=0)

    def _hear(self, rid: str, event: ServerEvent | Exception | None) -> int:
        sent = self.sent.get(rid)
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
        # One of its new tokens may complete a stop text; it is the last then.
        decode = self._decode if sent.request.stop_text else None
        if decode is not None and sent.cut_at_text(decode, len(chunk.tokens)):
            finish = Finish.STOP
            if chunk.finish == Finish.RUNNING:
                self._ask_abort(sent)
                sent.hang_up()
        brought = len(sent.tokens) - before
        self.tokens_generated += brought
        if finish != Finish.RUNNING:
            self._end(sent, finish, chunk.reason if sent.abort_by_s is None else "")
        return brought

    def press_aborts(self) -> None:
        """Asks again for what has not ended, and ends here what the server does not answer for."""
        now = self.clock.monotonic()
        for sent in [s for s in self.sent.values() if s.abort_by_s is not None]:
            if now >= (sent.abort_by_s or 0.0):
                self._hang_up(sent)
            elif now - sent.asked_s >= ABORT_AGAIN_S:
                self._ask_abort(sent)

    def hang_up_all(self) -> None:
        for sent in list(self.sent.values()):
            self._hang_up(sent)

    def take_back(self) -> None:
        """Has what has no token yet wait again: its cache would be of other weights than named."""
        untouched = [sent for sent in self.sent.values() if not sent.tokens]
        for sent in untouched:
            self._forget(sent)
            self._ask_abort(sent)
            sent.hang_up()
            if sent.abort_by_s is not None:
                self._end_unsent(sent.request.id, Finish.ABORTED)
        back = {s.request.id: s.request for s in untouched if s.abort_by_s is None}
        self.waiting = back | self.waiting

    def close(self) -> None:
        """Leaves none at the server, unless that has ended."""
        self.waiting.clear()
        with contextlib.suppress(MeshError):
            asked = [self._ask_abort(sent) for sent in self.sent.values()]
            for answer in asked:
                self._http.result(answer, v0_5.ABORT, ABORT_S)
        self.sent.clear()

    def _ask_abort(self, sent: SentRequest) -> Pending[None]:
        sent.asked_s = self.clock.monotonic()
        return self._http.begin("POST", v0_5.ABORT, {"rid": sent.rid}, deadline_s=ABORT_S)

    def _hang_up(self, sent: SentRequest) -> None:
        """Ends here what the server has not ended: it aborts a request that nobody listens to."""
        sent.hang_up()
        self._end(sent, Finish.ABORTED)

    def _end(self, sent: SentRequest, finish: Finish, reason: str = "") -> None:
        self._forget(sent)
        piece = sent.take(finish)
        assert piece is not None
        self._over.append(piece)
        if reason:
            log.warning("request %d was ended by SGLang: %s", sent.request.id, reason)

    def _forget(self, sent: SentRequest) -> None:
        del self.sent[sent.rid]
        del self._rids[sent.request.id]

    def _end_unsent(self, request_id: int, finish: Finish) -> None:
        none = np.zeros(0, np.int32)
        self._over.append(FlushPiece(request_id, none, none.astype(np.float32), none, finish))
