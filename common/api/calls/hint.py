"""The hint `Look`, by which one service tells another to read the state again. It carries no
orders, so losing it is harmless.
"""

from __future__ import annotations

from common.base.encoding.messages import message


@message
class Look:
    """The hint. Whoever gets it reads the state again."""

    what: str  # what changed, for the log
