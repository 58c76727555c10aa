"""One request that was sent to the server: its results, and those that are not drained yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshrl.common.api.engine import FinishReason
from meshrl.common.generation.builtin.stop_strings import DECODE_MARGIN_TOKENS
from meshrl.common.generation.engine_contract import NO_VERSION, GenerationRequest, RequestOutput
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.adapters import LoadedAdapter
from meshrl.services.engine.sglang.http_client import PendingResult

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class SentRequest:
    """Request that was sent to the server, with its results and those that are not drained yet."""

    request: GenerationRequest
    rid: str  # of its last sending
    max_new_tokens: int  # tokens that it may generate
    version: int = NO_VERSION  # version of the weights since its last sending
    cache_key: str = ""  # name of the weights of its keys and values
    first_token: int = 0  # tokens that it had at its last sending
    is_withdrawn: bool = False  # its abort at the server is no end: it waits here afterwards
    stream: PendingResult[None] | None = None
    tokens: list[int] = field(default_factory=list)  # all received tokens
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    drained_tokens: int = 0
    retractions: int = 0  # how often its cache was dropped since its last sending
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
        version = self.version if self.adapter is None else self.adapter.version
        self.versions += [version] * len(chunk.tokens)

    def count_other_versions(self, spans: Sequence[tuple[int, int, int]]) -> int:
        """Count the tokens for which SGLang reports a version other than the request's."""
        return sum(max(0, end - start) for version, start, end in spans if version != self.version)

    def find_finish(self) -> FinishReason:
        """Return why its last token ends it although the server reports only an abort."""
        if self.tokens and self.tokens[-1] in self.request.stop_ids:
            return FinishReason.STOP
        is_full = len(self.tokens) >= self.max_new_tokens
        return FinishReason.LENGTH if is_full else FinishReason.RUNNING

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
