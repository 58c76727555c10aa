"""The interface by which a core's weights are staged, some at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from common.weights.layout.laying import Laid

Run = Callable[..., Awaitable[Any]]  # runs what blocks, as the arithmetic of its learner


class WeightStaging(Protocol):
    """One staging, from the first rows to the last. `close` it whatever happens; what was not
    `end`ed is given up then.
    """

    async def copy(self, names: Sequence[str], part: int, parts: int) -> None:
        """Copies part number `part` of `parts` of the rows of some weights; they go on being
        written.
        """

    async def settled(self) -> None:
        """Returns when there is room for more."""

    async def end(self) -> list[Laid]:
        """What each process has staged, once all of it is in the store."""

    async def close(self) -> None: ...
