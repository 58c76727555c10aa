"""Context of a request outside its message: its trace, and the deadline of the call that it
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
    """Call that the running code serves.

    Its deadline bounds the calls made for it, until the call is finished.
    """

    deadline: float
    sender: str  # incarnation of the requester
    owner: str | bytes  # its key, which it has proved; where processes have none, its connection
    is_finished: bool = field(default=False, init=False)


current_call: ContextVar[CallScope | None] = ContextVar("scope", default=None)


def adopt_trace(traceparent: str) -> None:
    """Continue the trace of `traceparent` in this context; a malformed one starts none."""
    _trace.set(traceparent[:TRACE_PREFIX_CHARS] if len(traceparent) == TRACEPARENT_CHARS else "")


def read_trace_id() -> str:
    """Return the trace id: 32 hex digits, or empty outside any trace."""
    return _trace.get()[3:35]


class Tracer:
    """Source of each call's traceparent; a call outside any trace starts one."""

    def __init__(self, random: Random) -> None:
        self._random = random
        # the upper half of our span ids; the call id is the lower
        self._process = random.hex_token(4)

    def make_traceparent(self, call_id: int) -> str:
        """Return the W3C `traceparent` of an outgoing call.

        It names the current trace or a new one, and the call as parent.
        """
        prefix = _trace.get() or f"00-{self._random.hex_token(16)}-"
        return f"{prefix}{self._process}{call_id & 0xFFFFFFFF:08x}-01"
