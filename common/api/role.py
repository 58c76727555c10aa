"""The interface of every role process towards the worker that started it: draining."""

from __future__ import annotations

from common.runtime.interface import Call, Interface
from common.wire.frames import message


@message
class Drain:
    """Asks a role process to finish what it can within the deadline and to give back the rest."""

    reason: str  # why the gang leaves this role, for the log


@message
class Drained:
    """The answer to Drain; the process may be ended now."""


class Drainable(Interface):
    """The methods that every role process has."""

    drain = Call(Drain, Drained, deadline_s=5.0, idempotent=True)
