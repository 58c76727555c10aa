"""Calls that have no answer yet, by address, and what they fail with."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from common.api.calls.interface import Method
from common.base.encoding.messages import Frame
from common.base.errors import BadMessage, MeshError, PeerLost, from_wire
from common.mesh.runtime.calls.directory import Route
from common.mesh.wire.frames import unpack_error


class Link:
    """The calls under way towards one address, and those that wait for a credit."""

    __slots__ = ("address", "in_flight", "queue", "used")

    def __init__(self, address: str, now: float) -> None:
        self.address = address
        self.in_flight = 0
        self.queue: deque[Outstanding] = deque()
        self.used = now


class Outstanding:
    """One call that has no answer yet: a row of the table."""

    __slots__ = (
        "answered",
        "call_id",
        "deadline",
        "frames",
        "future",
        "link",
        "method",
        "ran",
        "route",
        "sent",
        "since",
    )

    def __init__(
        self,
        call_id: int,
        route: Route,
        method: Method[Any],
        frames: list[Frame],
        future: asyncio.Future[Sequence[Frame]],
        link: Link,
        since: float,
        deadline: float,
    ) -> None:
        self.call_id = call_id
        self.route = route
        self.method = method
        self.frames = frames
        self.future = future
        self.link = link
        self.since = since
        self.deadline = deadline
        self.sent = False
        self.ran = True  # False once it is known that the method did not run
        self.answered = False  # True for an error that the peer itself reported

    def fail(self, error: MeshError) -> None:
        """Gives the caller an error, unless it has its answer already."""
        if not self.future.done():
            self.future.set_exception(error)


def reported(frames: list[Frame], actor: str) -> MeshError:
    """What the peer raised. Whatever is wrong with its answer, it ends the call: no
    deadline watches over it any more.
    """
    try:
        return from_wire(*unpack_error(frames[1]), where=actor)
    except BadMessage as error:
        return error
    except Exception as error:
        said = f"an error of {actor} cannot be taken in: {type(error).__name__}: {error}"
        return BadMessage(said, where=actor)


def gone(route: Route, method: Method[Any]) -> PeerLost:
    """What a call fails with whose callee has ended."""
    return PeerLost(f"{method.label}: the process of {route.actor} has gone", where=route.actor)
