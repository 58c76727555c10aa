"""Actors that answer whole interfaces and only record the calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from loadtests.doors.matrix import ANSWERS
from meshrl.common.api.calls.interface import Call, Cast
from meshrl.common.mesh.runtime.calls.actor import Actor, call, cast, stream


def make_recording_actor(kind: str, ran: list[str]) -> Actor | None:
    """Return an actor with the methods of this kind of process; append calls to `ran`."""
    interface = ANSWERS.get(kind)
    if interface is None:
        return None

    def make_method(method: Any) -> Any:
        def run(self: Actor, request: Any) -> Any:
            ran.append(method.label)

        async def produce(self: Actor, request: Any) -> AsyncIterator[Any]:
            ran.append(method.label)
            yield None

        if isinstance(method, Call):
            return call(method)(run)
        return cast(method)(run) if isinstance(method, Cast) else stream(method)(produce)

    members = {name: make_method(method) for name, method in interface.methods.items()}
    actor: Actor = type(f"Any{kind}", (Actor,), {"interface": interface, **members})()
    return actor
