"""The one hint services send each other: look at the state again. It carries no orders, so losing
it is harmless.
"""

from __future__ import annotations

from common.wire.frames import message


@message
class Look:
    """The hint. Whoever gets it reads the state again."""

    what: str  # what changed, for the log
