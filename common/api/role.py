"""What every role process offers the worker that started it: to finish what it has and let go."""

from __future__ import annotations

from common.runtime.interface import Call, Interface
from common.wire.frames import message


@message
class Drain:
    reason: str  # why the gang leaves this role, for the log


@message
class Drained:
    pass


class Drainable(Interface):
    drain = Call(Drain, Drained, deadline_s=5.0, idempotent=True)
