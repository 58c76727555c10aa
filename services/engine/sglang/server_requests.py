"""Requests in work at the server, and their state in this process.

Before a pause and before new weights all requests are withdrawn from the server: aborted there, and
kept here with all their tokens. They are sent again as continuations. So each token is of the
version that its request was sent under, however SGLang batches tokens or overlaps steps.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

import numpy as np

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import DeadlineExceeded, MeshError
from meshrl.common.generation.builtin.stop_strings import (
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
from meshrl.services.engine.sglang.http_client import (
    LOG_HINT,
    HttpClient,
    PendingResult,
    ServerEvent,
)
from meshrl.services.engine.sglang.sent_request import Decode, SentRequest
from meshrl.services.engine.sglang.stream_interval import TokenRate, choose_stream_interval

ABORT_TIMEOUT_S = 3.0  # for the last tokens of an aborted request
ABORT_RETRY_S = 0.3  # an abort that overtakes its request has no effect

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SentWeights:
    """Weights of the server while requests are sent."""

    version: int
    cache_key: str  # name of the keys and values that they compute
    keeps_caches: bool  # withdrawn requests continue on keys and values of earlier weights


class ServerRequests:
    """Requests of one server: waiting here, at the server (at most `slots`), and finished.

    Withdrawn requests were at the server, have tokens, and wait here to continue.
    """

    def __init__(
        self,
        http: HttpClient,
        ids_end: int,
        slots: int,
        max_length: int,
        decode: Decode | None,
        clock: Clock,
        stream_interval: int = 0,
    ) -> None:
        """Initialize the requests.

        `ids_end` is the exclusive end of the token ids that may be sampled. `stream_interval` is
        the number of tokens that the server sends together; 0: chosen by the measured rate.
        """
        self.tokens_generated = self.tokens_computed = self.preempted = 0
        self._steps = 0.0
        self.tokens_cached = 0  # tokens that the server found in any tier of its cache
        self.num_events = 0  # events of streams
        self.relabelled_tokens = 0  # tokens for which the server reports another version
        self.waiting_requests: dict[int, GenerationRequest] = {}  # by id, in order
        self.withdrawn_requests: dict[int, SentRequest] = {}  # by id, in order
        self.sent_requests: dict[str, SentRequest] = {}  # at the server, by rid
        self.stop_checker, self.max_length = StopStringChecker(decode), max_length
        self.ids_end, self.clock = ids_end, clock
        self._http, self._slots, self._decode = http, slots, decode
        self._stream_interval, self._rate = stream_interval, TokenRate()
        self._events: SimpleQueue[tuple[str, ServerEvent | Exception | None]] = SimpleQueue()
        self._rids: dict[int, str] = {}
        self._finished_pieces: list[RequestOutput] = []  # finished, not drained
        self._rid_prefix = os.urandom(4).hex()
        self._numbers = itertools.count()

    @property
    def steps(self) -> int:
        """Estimated steps of the server."""
        return int(self._steps)

    @property
    def has_ended(self) -> bool:
        return bool(self._finished_pieces)

    def create_rid(self) -> str:
        """Return a request id that is unique at the server."""
        return f"{self._rid_prefix}{next(self._numbers):010d}"

    def add(self, request: GenerationRequest) -> None:
        """Queue a request, or finish it if it needs no tokens; ignore one that is in work."""
        known = self.waiting_requests, self.withdrawn_requests, self._rids
        if any(request.id in ids for ids in known):
            return
        if request.max_new_tokens < 1 or len(request.tokens) >= self.max_length:
            self._finish_unsent(request.id, FinishReason.LENGTH)
        elif self.stop_checker.has_stopped(request):
            self._finish_unsent(request.id, FinishReason.STOP)
        else:
            self.waiting_requests[request.id] = request

    def abort(self, ids: Iterable[int]) -> None:
        for request_id in ids:
            if self.waiting_requests.pop(request_id, None):
                self._finish_unsent(request_id, FinishReason.ABORTED)
            elif withdrawn := self.withdrawn_requests.pop(request_id, None):
                self._add_finished_piece(withdrawn, FinishReason.ABORTED)
            elif rid := self._rids.get(request_id):
                sent = self.sent_requests[rid]
                sent.abort_deadline_s = self.clock.monotonic() + ABORT_TIMEOUT_S
                self._send_abort(sent)

    @property
    def started_requests(self) -> list[SentRequest]:
        """Requests that were sent and are not finished."""
        return [*self.withdrawn_requests.values(), *self.sent_requests.values()]

    def drain(self, ended_only: bool = False) -> EngineOutput | None:
        pieces, self._finished_pieces = self._finished_pieces, []
        if not ended_only:
            pieces += [piece for sent in self.started_requests if (piece := sent.take_piece())]
        return combine_outputs(pieces)

    def send_waiting(
        self,
        weights: SentWeights,
        adapters: Mapping[str, LoadedAdapter],
        mark_alive: Callable[[], None],
    ) -> None:
        """Send withdrawn and waiting requests to free slots of the server, in this order.

        `weights` are the server's; `mark_alive` is called on the loop when the server has sent
        something.
        """
        while len(self.sent_requests) < self._slots:
            if self.withdrawn_requests:
                sent = self.withdrawn_requests.pop(next(iter(self.withdrawn_requests)))
            elif self.waiting_requests:
                request = self.waiting_requests.pop(next(iter(self.waiting_requests)))
                most = min(request.max_new_tokens, self.max_length - len(request.tokens))
                sent = SentRequest(request, "", most)
                sent.adapter = adapters.get(request.adapter)
            else:
                return
            self._send(sent, weights, mark_alive)

    def _send(
        self, sent: SentRequest, weights: SentWeights, mark_alive: Callable[[], None]
    ) -> None:
        """Send a request, or what is left of it after it was withdrawn."""
        adapter = sent.adapter.server_name if sent.adapter is not None else ""
        # An adapter keeps its version, so its tokens would not show that their cache is of another
        # base.
        if not (sent.cache_key and weights.keeps_caches and not adapter):
            sent.cache_key = weights.cache_key + adapter
        sent.rid, sent.version, sent.is_withdrawn = self.create_rid(), weights.version, False
        sent.first_token, sent.retractions = len(sent.tokens), 0
        self.sent_requests[sent.rid] = sent
        self._rids[sent.request.id] = sent.rid
        body = v0_5.build_generate_body(
            sent.request,
            sent.max_new_tokens - sent.first_token,
            sent.rid,
            sent.cache_key,
            self.ids_end,
            adapter,
            generated=sent.tokens,
            stream_interval=self._stream_interval or choose_stream_interval(self._rate.token_s),
        )
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
        """Process the events that have arrived; wait up to `wait_s` for the first one."""
        running, new_tokens = len(self.sent_requests), 0
        self._rate.add_time(self.clock.monotonic(), running)
        try:
            rid, event = self._events.get(timeout=wait_s) if wait_s else self._events.get_nowait()
            while True:
                new_tokens += self._process_event(rid, event)
                rid, event = self._events.get_nowait()
        except Empty:
            self._rate.add_tokens(new_tokens)
            # The server does not report its steps: each adds a token to most requests.
            self._steps += new_tokens / max(1, running)

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
        self.num_events += 1
        before = len(sent.tokens)
        plain = v0_5.is_plain_sampling(sent.request)
        chunk = v0_5.parse_chunk(event, before - sent.first_token, plain)
        sent.add_chunk(chunk)
        self.tokens_computed += chunk.computed_tokens + len(chunk.tokens)
        if not sent.first_token:
            self.tokens_cached += chunk.cached_tokens
        if sent.adapter is None:  # spans are versions of the base
            self.relabelled_tokens += sent.count_other_versions(chunk.spans)
        self.preempted += max(0, chunk.retractions - sent.retractions)
        sent.retractions = max(sent.retractions, chunk.retractions)
        finish, is_aborted_by_user = chunk.finish, sent.abort_deadline_s is not None
        if finish == FinishReason.ABORTED and sent.is_withdrawn and not is_aborted_by_user:
            finish = sent.find_finish()
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
            self._finish(sent, finish, "" if is_aborted_by_user else chunk.reason)
        elif chunk.finish != FinishReason.RUNNING:
            self._keep_withdrawn(sent)
        return num_new_tokens

    def withdraw_all(self, deadline_s: float) -> None:
        """Withdraw all requests from the server with all their tokens, so that it is idle.

        Raise DeadlineExceeded if it did not end them in time; those that it ends later are
        withdrawn then.
        """
        until_s = self.clock.monotonic() + deadline_s
        for sent in self.sent_requests.values():
            sent.is_withdrawn = True
        while self.sent_requests:
            if self.clock.monotonic() >= until_s:
                raise DeadlineExceeded(
                    f"SGLang did not end {len(self.sent_requests)} aborted requests within "
                    f"{deadline_s:g} s",
                    where=self._http.url,
                    fix=LOG_HINT,
                )
            self._http.start_call("POST", v0_5.ABORT, v0_5.ABORT_ALL, deadline_s=ABORT_TIMEOUT_S)
            retry_s = min(self.clock.monotonic() + ABORT_RETRY_S, until_s)
            while self.sent_requests and (left_s := retry_s - self.clock.monotonic()) > 0:
                self.receive_events(left_s)

    def _keep_withdrawn(self, sent: SentRequest) -> None:
        """Let a request wait here that the server has ended; one without tokens starts again."""
        self._remove(sent)
        if sent.tokens:
            self.withdrawn_requests[sent.request.id] = sent
        else:
            self.waiting_requests = {sent.request.id: sent.request} | self.waiting_requests

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

    def close(self) -> None:
        """Abort all requests at the server, unless it has exited."""
        self.waiting_requests.clear()
        self.withdrawn_requests.clear()
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
        self._add_finished_piece(sent, finish)
        if reason and finish == FinishReason.ABORTED:
            log.warning("SGLang aborted request %d: %s", sent.request.id, reason)

    def _add_finished_piece(self, sent: SentRequest, finish: FinishReason) -> None:
        piece = sent.take_piece(finish)
        assert piece is not None
        self._finished_pieces.append(piece)

    def _remove(self, sent: SentRequest) -> None:
        del self.sent_requests[sent.rid]
        del self._rids[sent.request.id]

    def _finish_unsent(self, request_id: int, finish: FinishReason) -> None:
        none = np.zeros(0, np.int32)
        self._finished_pieces.append(
            RequestOutput(request_id, none, none.astype(np.float32), none, finish)
        )
