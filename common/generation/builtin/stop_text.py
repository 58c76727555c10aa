"""Stop texts: requests end when their last tokens decode to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshrl.common.api.engine import Finish
from meshrl.common.base.errors import Refused
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.contract import Request

MARGIN = 8  # tokens: a character may be spread over several that say nothing by themselves


def begin_of(request: Request) -> int:
    """Where the turn begins that the request generates."""
    return len(request.tokens) if request.begin < 0 else request.begin


class StopText:
    """Looks at a slot after each of its tokens: the one that completes a text is the last."""

    def __init__(self, decode: Callable[[Sequence[int]], str] | None) -> None:
        self._decode = decode
        self._texts: dict[int, tuple[str, ...]] = {}  # by slot, where there are some
        self._begin: dict[int, int] = {}  # where their turns begin

    def __bool__(self) -> bool:
        return bool(self._texts)

    def check(self, request: Request) -> None:
        """Refused when the request names a text and the engine cannot decode tokens."""
        if request.stop_text and self._decode is None:
            raise Refused(
                f"request {request.id} has stop texts, and this engine has no tokenizer",
                where="engine",
                fix="stop at token ids, or start the engine with a tokenizer",
            )

    def met(self, request: Request) -> bool:
        """Whether the turn so far, generated elsewhere, completes a stop text already."""
        if not request.stop_text or self._decode is None:
            return False
        text = self._decode(request.tokens[begin_of(request) :].tolist())
        return any(stop in text for stop in request.stop_text)

    def place(self, slot: int, request: Request) -> None:
        """Remembers where the request of a slot begins and which texts end it."""
        if request.stop_text:
            self._texts[slot] = request.stop_text
            self._begin[slot] = begin_of(request)

    def end(self, slot: int) -> None:
        """Forgets the slot's request."""
        self._texts.pop(slot, None)
        self._begin.pop(slot, None)

    def look(self, slots: Slots) -> None:
        """Marks the slots whose newest token completes one of their texts."""
        assert self._decode is not None
        for slot, texts in self._texts.items():
            end = int(slots.known[slot])
            longest = max(len(text.encode()) for text in texts)  # a token is a byte at least
            start = max(self._begin[slot], end - longest - MARGIN)
            if start == end:
                continue
            text = self._decode(slots.tokens[slot, start:end].tolist())
            if any(stop in text for stop in texts):
                slots.finish[slot] = Finish.STOP
