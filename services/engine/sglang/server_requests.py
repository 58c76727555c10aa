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

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import MeshError
from meshrl.common.generation.builtin.stop_strings import (
    DECODE_MARGIN_TOKENS,
    StopStringChecker,
    get_turn_start,
)
from meshrl.common.generation.engine_contract import (
    EngineOutput,
    GenerationRequest,
    RequestOutput,
    combine_outputs,
)
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.adapters import LoadedAdapter
from meshrl.services.engine.sglang.http_client import HttpClient, PendingResult, ServerEvent

ABORT_TIMEOUT_S = 3.0  # for the last tokens of an aborted request
ABORT_RETRY_S = 0.3  # an abort that overtakes its request is not heard

Decode = Callable[[Sequence[int]], str]
log = logging.getLogger(__name__)


@dataclass(slots=True)
class SentRequest:
    """A request at the server: what has come of it, and what of that has not been drained."""

    request: GenerationRequest
    rid: str
    max_new_tokens: int  # tokens that it may generate
    stream: PendingResult[None] | None = None
    tokens: list[int] = field(default_factory=list)  # all that came
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    drained_tokens: int = 0
    retractions: int = 0  # how often it gave up its cache
    abort_deadline_s: float | None = None  # asked to end: without an answer by then it ends here
    adapter: LoadedAdapter | None = None  # that it computes with, beside the base
    abort_sent_s: float = 0.0  # when the server was last asked to abort it

    def close_stream(self) -> None:
        if self.stream is not None:
            self.stream.cancel()

    def add_chunk(self, chunk: v0_5.StreamChunk) -> None:
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self.raw_logprobs += chunk.raw_logprobs
        version = chunk.version if self.adapter is None else self.adapter.version
        self.versions += [version] * len(chunk.tokens)

    def correct_versions(self, spans: Sequence[tuple[int, int, int]]) -> int:
        """Takes what the server says of all tokens at the end; how many had been told otherwise
        and are drained already."""
        wrong = 0
        if self.adapter is not None:  # spans are of the base
            return 0
        for version, start, end in spans:
            for place in range(start, min(end, len(self.versions))):
                wrong += self.versions[place] != version and place < self.drained_tokens
                self.versions[place] = version
        return wrong

    def cut_at_stop_string(self, decode: Decode, new_tokens: int) -> bool:
        """Leaves out what follows the token that completes a stop text; `came` are new."""
        texts = self.request.stop_strings
        longest = max(len(text.encode()) for text in texts)  # a token is a byte at least
        window = longest + DECODE_MARGIN_TOKENS
        begin = get_turn_start(self.request)
        given = self.request.tokens[max(begin, len(self.request.tokens) - window) :].tolist()
        known = [*given, *self.tokens[-(window + new_tokens) :]] if new_tokens else []
        for back in range(new_tokens - 1, -1, -1):
            end = len(known) - back
            text = decode(known[max(0, end - window) : end])
            if any(stop in text for stop in texts):
                for column in (self.tokens, self.logprobs, self.raw_logprobs, self.versions):
                    del column[len(column) - back :]
                return True
        return False

    def take_piece(self, finish: FinishReason = FinishReason.RUNNING) -> RequestOutput | None:
        """What has come since the last call; None if that is nothing and it goes on."""
        part = slice(self.drained_tokens, len(self.tokens))
        if part.start == part.stop and finish == FinishReason.RUNNING:
            return None
        self.drained_tokens = len(self.tokens)
        asked = self.request.wants_raw_logprobs
        return RequestOutput(
            self.request.id,
            np.array(self.tokens[part], np.int32),
            np.array(self.logprobs[part], np.float32),
            np.array(self.versions[part], np.int32),
            finish,
            np.array(self.raw_logprobs[part], np.float32) if asked else None,
        )


class ServerRequests:
    """The requests of one server: those that wait here, those that it works on, those that have
    ended. At most `slots` are at the server.
    """

    def __init__(
        self,
        http: HttpClient,
        ids_end: int,
        slots: int,
        max_length: int,
        decode: Decode | None,
        clock: Clock,
    ) -> None:
        """`ids_end`: the end of the token ids that may be sampled."""
        self.steps = self.tokens_generated = self.tokens_computed = self.preempted = 0
        self.tokens_cached = 0  # that its server found, on whatever tier of its own
        self.relabelled_tokens = (
            0  # tokens that were handed on under another version than they are of
        )
        self.waiting_requests: dict[int, GenerationRequest] = {}  # by id, in order
        self.sent_requests: dict[str, SentRequest] = {}  # at the server, by rid
        self.stop_checker, self.max_length = StopStringChecker(decode), max_length
        self.ids_end, self.clock = ids_end, clock
        self._http, self._slots, self._decode = http, slots, decode
        self._events: SimpleQueue[tuple[str, ServerEvent | Exception | None]] = SimpleQueue()
        self._rids: dict[int, str] = {}
        self._finished_pieces: list[RequestOutput] = []  # ended, not drained
        self._rid_prefix = os.urandom(4).hex()
        self._numbers = itertools.count()

    @property
    def has_ended(self) -> bool:
        return bool(self._finished_pieces)

    def create_rid(self) -> str:
        """A name for a request, unlike all others at the server."""
        return f"{self._rid_prefix}{next(self._numbers):010d}"

    def add(self, request: GenerationRequest) -> None:
        """Has a request wait, or ends it where there is nothing to generate; one that is in work
        is left alone.
        """
        if request.id in self.waiting_requests or request.id in self._rids:
            return
        if request.max_new_tokens < 1 or len(request.tokens) >= self.max_length:
            self._finish_unsent(request.id, FinishReason.LENGTH)
        elif self.stop_checker.has_stopped(request):
            self._finish_unsent(request.id, FinishReason.STOP)
        else:
            self.waiting_requests[request.id] = request

    def abort(self, ids: Iterable[int], is_paused: bool) -> None:
        """Ends requests; of a server that `stands` nothing more would come of them."""
        for request_id in ids:
            if self.waiting_requests.pop(request_id, None):
                self._finish_unsent(request_id, FinishReason.ABORTED)
            elif rid := self._rids.get(request_id):
                sent = self.sent_requests[rid]
                sent.abort_deadline_s = self.clock.monotonic() + ABORT_TIMEOUT_S
                self._send_abort(sent)
                if is_paused:  # all that it generated has come
                    self._abort_locally(sent)

    def drain(self, ended_only: bool = False) -> EngineOutput | None:
        pieces, self._finished_pieces = self._finished_pieces, []
        if not ended_only:
            pieces += [
                piece for sent in self.sent_requests.values() if (piece := sent.take_piece())
            ]
        return combine_outputs(pieces)

    def send_waiting(
        self, cache_key: str, adapters: Mapping[str, LoadedAdapter], mark_alive: Callable[[], None]
    ) -> None:
        """Gives the server what it has room for. `cache` names the weights that what it computes
        is of; `heard` is called on the loop when the server has said something.
        """
        while self.waiting_requests and len(self.sent_requests) < self._slots:
            request = self.waiting_requests.pop(next(iter(self.waiting_requests)))
            most = min(request.max_new_tokens, self.max_length - len(request.tokens))
            sent = SentRequest(request, self.create_rid(), most)
            sent.adapter = adapters.get(request.adapter)
            self.sent_requests[sent.rid] = sent
            self._rids[request.id] = sent.rid
            adapter = sent.adapter.server_name if sent.adapter is not None else ""
            about = request, most, sent.rid, cache_key + adapter, self.ids_end
            body = v0_5.build_generate_body(*about, adapter)
            put = partial(self._enqueue_event, sent.rid, mark_alive)
            sent.stream = self._http.stream(v0_5.GENERATE, body, put)

    def _enqueue_event(
        self, rid: str, mark_alive: Callable[[], None], event: ServerEvent | Exception | None
    ) -> None:
        """Hands over an event of a stream, its error, or None at its end; runs on the loop."""
        mark_alive()
        self._events.put((rid, event))

    # -- what has come ---------------------------------------------------------------------------

    def receive_events(self, wait_s: float) -> None:
        came: Counter[str] = Counter()
        try:
            rid, event = self._events.get(timeout=wait_s) if wait_s else self._events.get_nowait()
            while True:
                came[rid] += self._process_event(rid, event)
                rid, event = self._events.get_nowait()
        except Empty:
            # The server does not say what it did in one step: at least this many brought it.
            self.steps += max(came.values(), default=0)

    def _process_event(self, rid: str, event: ServerEvent | Exception | None) -> int:
        sent = self.sent_requests.get(rid)
        if sent is None:  # it has ended here
            return 0
        if not isinstance(event, dict):
            self._finish(
                sent, FinishReason.ABORTED, repr(event) if event else "its stream ended early"
            )
            return 0
        chunk = v0_5.parse_chunk(event, len(sent.tokens), v0_5.is_plain_sampling(sent.request))
        before = len(sent.tokens)
        sent.add_chunk(chunk)
        self.tokens_computed += chunk.computed_tokens + len(chunk.tokens)
        self.tokens_cached += chunk.cached_tokens
        self.relabelled_tokens += sent.correct_versions(chunk.spans)
        self.preempted += max(0, chunk.retractions - sent.retractions)
        sent.retractions = max(sent.retractions, chunk.retractions)
        finish = chunk.finish
        # One of its new tokens may complete a stop text; it is the last then.
        decode = self._decode if sent.request.stop_strings else None
        if decode is not None and sent.cut_at_stop_string(decode, len(chunk.tokens)):
            finish = FinishReason.STOP
            if chunk.finish == FinishReason.RUNNING:
                self._send_abort(sent)
                sent.close_stream()
        brought = len(sent.tokens) - before
        self.tokens_generated += brought
        if finish != FinishReason.RUNNING:
            self._finish(sent, finish, chunk.reason if sent.abort_deadline_s is None else "")
        return brought

    def retry_aborts(self) -> None:
        """Asks again for what has not ended, and ends here what the server does not answer for."""
        now = self.clock.monotonic()
        for sent in [s for s in self.sent_requests.values() if s.abort_deadline_s is not None]:
            if now >= (sent.abort_deadline_s or 0.0):
                self._abort_locally(sent)
            elif now - sent.abort_sent_s >= ABORT_RETRY_S:
                self._send_abort(sent)

    def abort_all_locally(self) -> None:
        for sent in list(self.sent_requests.values()):
            self._abort_locally(sent)

    def requeue_untouched(self) -> None:
        """Has what has no token yet wait again: its cache would be of other weights than named."""
        untouched = [sent for sent in self.sent_requests.values() if not sent.tokens]
        for sent in untouched:
            self._remove(sent)
            self._send_abort(sent)
            sent.close_stream()
            if sent.abort_deadline_s is not None:
                self._finish_unsent(sent.request.id, FinishReason.ABORTED)
        back = {s.request.id: s.request for s in untouched if s.abort_deadline_s is None}
        self.waiting_requests = back | self.waiting_requests

    def close(self) -> None:
        """Leaves none at the server, unless that has ended."""
        self.waiting_requests.clear()
        with contextlib.suppress(MeshError):
            asked = [self._send_abort(sent) for sent in self.sent_requests.values()]
            for answer in asked:
                self._http.wait_for(answer, v0_5.ABORT, ABORT_TIMEOUT_S)
        self.sent_requests.clear()

    def _send_abort(self, sent: SentRequest) -> PendingResult[None]:
        sent.abort_sent_s = self.clock.monotonic()
        return self._http.start_call(
            "POST", v0_5.ABORT, {"rid": sent.rid}, deadline_s=ABORT_TIMEOUT_S
        )

    def _abort_locally(self, sent: SentRequest) -> None:
        """Ends here what the server has not ended: it aborts a request that nobody listens to."""
        sent.close_stream()
        self._finish(sent, FinishReason.ABORTED)

    def _finish(self, sent: SentRequest, finish: FinishReason, reason: str = "") -> None:
        self._remove(sent)
        piece = sent.take_piece(finish)
        assert piece is not None
        self._finished_pieces.append(piece)
        if reason:
            log.warning("request %d was ended by SGLang: %s", sent.request.id, reason)

    def _remove(self, sent: SentRequest) -> None:
        del self.sent_requests[sent.rid]
        del self._rids[sent.request.id]

    def _finish_unsent(self, request_id: int, finish: FinishReason) -> None:
        none = np.zeros(0, np.int32)
        self._finished_pieces.append(
            RequestOutput(request_id, none, none.astype(np.float32), none, finish)
        )
