"""The context of a request beside its message: its trace, and the deadline of the call that it
serves.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from meshrl.common.base.random import Random

TRACE_PREFIX_CHARS = 36  # characters of a W3C traceparent's version, trace id and dashes
TRACEPARENT_CHARS = 55

_trace: ContextVar[str] = ContextVar("trace", default="")


@dataclass(slots=True, eq=False)
class CallScope:
    """The call that the running code serves. Its deadline bounds calls made for it; once it is
    over, it bounds nothing.
    """

    deadline: float
    is_finished: bool = field(default=False, init=False)


current_call: ContextVar[CallScope | None] = ContextVar("scope", default=None)


def adopt_trace(traceparent: str) -> None:
    """What runs from here belongs to the trace of `traceparent`; anything malformed starts none."""
    _trace.set(traceparent[:TRACE_PREFIX_CHARS] if len(traceparent) == TRACEPARENT_CHARS else "")


def read_trace_id() -> str:
    """32 hex digits, or empty outside any trace."""
    return _trace.get()[3:35]


class Tracer:
    """Writes the traceparent of each call; a call outside any trace starts one."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._process = random.hex_token(
            4
        )  # the upper half of our span ids; the call id is the lower

    def make_traceparent(self, call_id: int) -> str:
        """The W3C `traceparent` of an outgoing call: the current trace or a new one, and the call
        as its parent.
        """
        prefix = _trace.get() or f"00-{self._random.hex_token(16)}-"
        return f"{prefix}{self._process}{call_id & 0xFFFFFFFF:08x}-01"
