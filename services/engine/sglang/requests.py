"""The requests that a server works on, and what this side knows of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.api.engine import Finish
from common.generation.builtin.stop_text import MARGIN, begin_of
from common.generation.contract import Piece, Request
from services.engine.sglang.adapters import Loaded
from services.engine.sglang.http import Pending
from services.engine.sglang.v0_5 import Chunk

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class Sent:
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
    adapter: Loaded | None = None  # that it computes with, beside the base
    asked_s: float = 0.0  # when the server was last asked to abort it

    def hang_up(self) -> None:
        """Nothing more of it is wanted."""
        if self.stream is not None:
            self.stream.cancel()

    def add(self, chunk: Chunk) -> None:
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

    def take(self, finish: Finish = Finish.RUNNING) -> Piece | None:
        """What has come since the last call; None if that is nothing and it goes on."""
        part = slice(self.drained, len(self.tokens))
        if part.start == part.stop and finish == Finish.RUNNING:
            return None
        self.drained = len(self.tokens)
        asked = self.request.unmodified
        return Piece(
            self.request.id,
            np.array(self.tokens[part], np.int32),
            np.array(self.logprobs[part], np.float32),
            np.array(self.versions[part], np.int32),
            finish,
            np.array(self.unmodified[part], np.float32) if asked else None,
        )
