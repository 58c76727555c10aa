"""Requests in work at the server, and their state in this process."""

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
ABORT_RETRY_S = 0.3  # an abort that overtakes its request has no effect

Decode = Callable[[Sequence[int]], str]
log = logging.getLogger(__name__)


@dataclass(slots=True)
class SentRequest:
    """Request at the server, with its results and those that are not drained yet."""

    request: GenerationRequest
    rid: str
    max_new_tokens: int  # tokens that it may generate
    stream: PendingResult[None] | None = None
    tokens: list[int] = field(default_factory=list)  # all received tokens
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    drained_tokens: int = 0
    retractions: int = 0  # how often its cache was dropped
    # after an abort: the request is finished here at this time without an answer
    abort_deadline_s: float | None = None
    adapter: LoadedAdapter | None = None  # adapter of the request
    abort_sent_s: float = 0.0  # when the last abort was sent

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
        """Apply the final weight versions of all tokens.

        Return how many tokens were already drained with another version.
        """
        wrong = 0
        if self.adapter is not None:  # spans are versions of the base
            return 0
        for version, start, end in spans:
            for place in range(start, min(end, len(self.versions))):
                wrong += self.versions[place] != version and place < self.drained_tokens
                self.versions[place] = version
        return wrong

    def cut_at_stop_string(self, decode: Decode, new_tokens: int) -> bool:
        """Drop tokens after the one that completes a stop string; check the last `new_tokens`."""
        texts = self.request.stop_strings
        longest = max(len(text.encode()) for text in texts)  # a token has at least one byte
        window = longest + DECODE_MARGIN_TOKENS
        begin = self.request.output_start
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
        """Return the output since the last call; None if it is empty and the request continues."""
        part = slice(self.drained_tokens, len(self.tokens))
        if part.start == part.stop and finish == FinishReason.RUNNING:
            return None
        self.drained_tokens = len(self.tokens)
        wants_raw = self.request.wants_raw_logprobs
        return RequestOutput(
            self.request.id,
            np.array(self.tokens[part], np.int32),
            np.array(self.logprobs[part], np.float32),
            np.array(self.versions[part], np.int32),
            finish,
            np.array(self.raw_logprobs[part], np.float32) if wants_raw else None,
        )


class ServerRequests:
    """Requests of one server: waiting here, at the server (at most `slots`), and finished."""

    def __init__(
        self,
        http: HttpClient,
        ids_end: int,
        slots: int,
        max_length: int,
        decode: Decode | None,
        clock: Clock,
    ) -> None:
        """Initialize; `ids_end` is the exclusive end of the token ids that may be sampled."""
        self.steps = self.tokens_generated = self.tokens_computed = self.preempted = 0
        self.tokens_cached = 0  # tokens that the server found in any tier of its cache
        self.relabelled_tokens = 0  # tokens that were drained under a wrong version
        self.waiting_requests: dict[int, GenerationRequest] = {}  # by id, in order
        self.sent_requests: dict[str, SentRequest] = {}  # at the server, by rid
        self.stop_checker, self.max_length = StopStringChecker(decode), max_length
        self.ids_end, self.clock = ids_end, clock
        self._http, self._slots, self._decode = http, slots, decode
        self._events: SimpleQueue[tuple[str, ServerEvent | Exception | None]] = SimpleQueue()
        self._rids: dict[int, str] = {}
        self._finished_pieces: list[RequestOutput] = []  # finished, not drained
        self._rid_prefix = os.urandom(4).hex()
        self._numbers = itertools.count()

    @property
    def has_ended(self) -> bool:
        return bool(self._finished_pieces)

    def create_rid(self) -> str:
        """Return a request id that is unique at the server."""
        return f"{self._rid_prefix}{next(self._numbers):010d}"

    def add(self, request: GenerationRequest) -> None:
        """Queue a request, or finish it if it needs no tokens; ignore one that is in work."""
        if request.id in self.waiting_requests or request.id in self._rids:
            return
        if request.max_new_tokens < 1 or len(request.tokens) >= self.max_length:
            self._finish_unsent(request.id, FinishReason.LENGTH)
        elif self.stop_checker.has_stopped(request):
            self._finish_unsent(request.id, FinishReason.STOP)
        else:
            self.waiting_requests[request.id] = request

    def abort(self, ids: Iterable[int], is_paused: bool) -> None:
        """Abort requests; a paused server sends no more tokens of them."""
        for request_id in ids:
            if self.waiting_requests.pop(request_id, None):
                self._finish_unsent(request_id, FinishReason.ABORTED)
            elif rid := self._rids.get(request_id):
                sent = self.sent_requests[rid]
                sent.abort_deadline_s = self.clock.monotonic() + ABORT_TIMEOUT_S
                self._send_abort(sent)
                if is_paused:  # all generated tokens have arrived
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
        """Send waiting requests to free slots of the server.

        `cache_key` names the weights of the cache that they may use; `mark_alive` is called on the
        loop when the server has sent something.
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
        """Queue an event of a stream, its error, or None at its end; runs on the loop."""
        mark_alive()
        self._events.put((rid, event))

    # -- results ---------------------------------------------------------------------------------

    def receive_events(self, wait_s: float) -> None:
        came: Counter[str] = Counter()
        try:
            rid, event = self._events.get(timeout=wait_s) if wait_s else self._events.get_nowait()
            while True:
                came[rid] += self._process_event(rid, event)
                rid, event = self._events.get_nowait()
        except Empty:
            # The server does not report its steps: this is the least number of them.
            self.steps += max(came.values(), default=0)

    def _process_event(self, rid: str, event: ServerEvent | Exception | None) -> int:
        sent = self.sent_requests.get(rid)
        if sent is None:  # the request was finished here
            return 0
        if not isinstance(event, dict):
            self._finish(
                sent,
                FinishReason.ABORTED,
                repr(event) if event else "the stream of its answer ended early",
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
        # A new token may complete a stop string and is then the last one.
        decode = self._decode if sent.request.stop_strings else None
        if decode is not None and sent.cut_at_stop_string(decode, len(chunk.tokens)):
            finish = FinishReason.STOP
            if chunk.finish == FinishReason.RUNNING:
                self._send_abort(sent)
                sent.close_stream()
        num_new_tokens = len(sent.tokens) - before
        self.tokens_generated += num_new_tokens
        if finish != FinishReason.RUNNING:
            self._finish(sent, finish, chunk.reason if sent.abort_deadline_s is None else "")
        return num_new_tokens

    def retry_aborts(self) -> None:
        """Retry aborts that are not confirmed; finish those whose deadline has passed."""
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
        """Requeue requests without a token: their cache would have other weights than its key
        names.
        """
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
        """Abort all requests at the server, unless it has exited."""
        self.waiting_requests.clear()
        with contextlib.suppress(MeshError):
            abort_calls = [self._send_abort(sent) for sent in self.sent_requests.values()]
            for answer in abort_calls:
                self._http.wait_for(answer, v0_5.ABORT, ABORT_TIMEOUT_S)
        self.sent_requests.clear()

    def _send_abort(self, sent: SentRequest) -> PendingResult[None]:
        sent.abort_sent_s = self.clock.monotonic()
        return self._http.start_call(
            "POST", v0_5.ABORT, {"rid": sent.rid}, deadline_s=ABORT_TIMEOUT_S
        )

    def _abort_locally(self, sent: SentRequest) -> None:
        """Finish a request here that the server has not finished.

        The server aborts a request whose connection is closed.
        """
        sent.close_stream()
        self._finish(sent, FinishReason.ABORTED)

    def _finish(self, sent: SentRequest, finish: FinishReason, reason: str = "") -> None:
        self._remove(sent)
        piece = sent.take_piece(finish)
        assert piece is not None
        self._finished_pieces.append(piece)
        if reason:
            log.warning("SGLang aborted request %d: %s", sent.request.id, reason)

    def _remove(self, sent: SentRequest) -> None:
        del self.sent_requests[sent.rid]
        del self._rids[sent.request.id]

    def _finish_unsent(self, request_id: int, finish: FinishReason) -> None:
        none = np.zeros(0, np.int32)
        self._finished_pieces.append(
            RequestOutput(request_id, none, none.astype(np.float32), none, finish)
        )
