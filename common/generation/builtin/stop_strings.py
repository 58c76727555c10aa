"""Stop texts: requests end when their last tokens decode to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.errors import Refused
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.engine_contract import GenerationRequest

DECODE_MARGIN_TOKENS = (
    8  # tokens: a character may be spread over several that say nothing by themselves
)


def get_turn_start(request: GenerationRequest) -> int:
    """Where the turn begins that the request generates."""
    return len(request.tokens) if request.turn_start < 0 else request.turn_start


class StopStringChecker:
    """Looks at a slot after each of its tokens: the one that completes a text is the last."""

    def __init__(self, decode: Callable[[Sequence[int]], str] | None) -> None:
        self._decode_tokens = decode
        self._stop_strings: dict[int, tuple[str, ...]] = {}  # by slot, where there are some
        self._turn_starts: dict[int, int] = {}  # where their turns begin

    def __bool__(self) -> bool:
        return bool(self._stop_strings)

    def check_request(self, request: GenerationRequest) -> None:
        """Refused when the request names a text and the engine cannot decode tokens."""
        if request.stop_strings and self._decode_tokens is None:
            raise Refused(
                f"request {request.id} has stop texts, and this engine has no tokenizer",
                where="engine",
                fix="stop at token ids, or start the engine with a tokenizer",
            )

    def has_stopped(self, request: GenerationRequest) -> bool:
        """Whether the turn so far, generated elsewhere, completes a stop text already."""
        if not request.stop_strings or self._decode_tokens is None:
            return False
        text = self._decode_tokens(request.tokens[get_turn_start(request) :].tolist())
        return any(stop in text for stop in request.stop_strings)

    def add_slot(self, slot: int, request: GenerationRequest) -> None:
        """Remembers where the request of a slot begins and which texts end it."""
        if request.stop_strings:
            self._stop_strings[slot] = request.stop_strings
            self._turn_starts[slot] = get_turn_start(request)

    def remove_slot(self, slot: int) -> None:
        """Forgets the slot's request."""
        self._stop_strings.pop(slot, None)
        self._turn_starts.pop(slot, None)

    def check_slots(self, slots: Slots) -> None:
        """Marks the slots whose newest token completes one of their texts."""
        assert self._decode_tokens is not None
        for slot, texts in self._stop_strings.items():
            end = int(slots.known[slot])
            longest = max(len(text.encode()) for text in texts)  # a token is a byte at least
            start = max(self._turn_starts[slot], end - longest - DECODE_MARGIN_TOKENS)
            if start == end:
                continue
            text = self._decode_tokens(slots.tokens[slot, start:end].tolist())
            if any(stop in text for stop in texts):
                slots.finish[slot] = FinishReason.STOP
