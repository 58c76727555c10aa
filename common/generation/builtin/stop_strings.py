"""Stop strings: a request ends if its last tokens decode to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.errors import Refused
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.engine_contract import GenerationRequest

DECODE_MARGIN_TOKENS = (
    8  # tokens, because a character may span several tokens that decode to no text alone
)


class StopStringChecker:
    """Check for stop strings after each token of a slot; a complete one ends the turn."""

    def __init__(self, decode: Callable[[Sequence[int]], str] | None) -> None:
        self._decode_tokens = decode
        self._stop_strings: dict[int, tuple[str, ...]] = {}  # by slot with stop strings
        self._starts: dict[int, int] = {}  # positions from which on a stop string counts

    def __bool__(self) -> bool:
        return bool(self._stop_strings)

    def check_request(self, request: GenerationRequest) -> None:
        """Raise Refused if the request has a stop string and the engine cannot decode tokens."""
        if request.stop_strings and self._decode_tokens is None:
            raise Refused(
                f"request {request.id} has stop texts, but this engine has no tokenizer",
                where="engine",
                fix="Set stop token ids, or start the engine with a tokenizer",
            )

    def has_stopped(self, request: GenerationRequest) -> bool:
        """Return True if the turn so far, generated elsewhere, completes a stop string already."""
        if not request.stop_strings or self._decode_tokens is None:
            return False
        text = self._decode_tokens(request.tokens[request.stop_start :].tolist())
        return any(stop in text for stop in request.stop_strings)

    def add_slot(self, slot: int, request: GenerationRequest) -> None:
        """Record a slot's stop strings."""
        if request.stop_strings:
            self._stop_strings[slot] = request.stop_strings
            self._starts[slot] = request.stop_start

    def remove_slot(self, slot: int) -> None:
        """Remove the slot's request."""
        self._stop_strings.pop(slot, None)
        self._starts.pop(slot, None)

    def check_slots(self, slots: Slots) -> None:
        """Mark the slots whose newest token completes a stop string."""
        assert self._decode_tokens is not None
        for slot, texts in self._stop_strings.items():
            end = int(slots.num_tokens[slot])
            longest = max(len(text.encode()) for text in texts)  # a token has at least one byte
            start = max(self._starts[slot], end - longest - DECODE_MARGIN_TOKENS)
            if start >= end:
                continue
            text = self._decode_tokens(slots.tokens[slot, start:end].tolist())
            if any(stop in text for stop in texts):
                slots.finish_reason[slot] = FinishReason.STOP
