"""Actors: objects of a process that answer the methods of one interface."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from meshrl.common.api.calls.interface import Call, Cast, Interface, Method, Stream
from meshrl.common.base.errors import ConfigError

Q = TypeVar("Q")
R = TypeVar("R")
A = TypeVar("A", bound="Actor")


class Actor:
    """Owner of some state. All its methods run on one loop, one at a time between two awaits.

    A method that is a plain `def` runs as soon as its message is read, without a task. This fast
    path is for methods under a millisecond.
    """

    interface: ClassVar[type[Interface]] = Interface

    async def start(self) -> None:
        """Start the actor, before other processes can find it."""

    async def stop(self) -> None:
        """Stop the actor, after no call can reach it."""


def call(
    method: Call[Q, R],
) -> Callable[[Callable[[A, Q], R | Awaitable[R]]], Callable[[A, Q], Any]]:
    """Mark the method that answers `method`."""
    return _make_marker(method)


def stream(
    method: Stream[Q, R],
) -> Callable[[Callable[[A, Q], AsyncIterator[R]]], Callable[[A, Q], AsyncIterator[R]]]:
    """Mark the async generator that answers `method`.

    It is closed when the consumer closes the stream or is lost.
    """
    return _make_marker(method)


def cast(
    method: Cast[Q],
) -> Callable[[Callable[[A, Q], Awaitable[None] | None]], Callable[[A, Q], Any]]:
    """Mark the method that receives `method`."""
    return _make_marker(method)


def _make_marker(method: Method[Any]) -> Callable[[Any], Any]:
    def mark(function: Any) -> Any:
        function.answers = method
        return function

    return mark


@dataclass(frozen=True, slots=True)
class BoundMethod:
    """Method of one actor, ready to be called by the mesh."""

    method: Method[Any]
    run: Callable[[Any], Any]
    is_async: bool  # an `async def`: needs a task


def bind(actor: Actor) -> dict[str, BoundMethod]:
    """Return methods by wire name; raise ConfigError unless the actor answers exactly its
    interface.
    """
    bound: dict[str, BoundMethod] = {}
    for name in dir(type(actor)):
        method = getattr(getattr(type(actor), name), "answers", None)
        if isinstance(method, Method):
            run = getattr(actor, name)
            bound[method.name] = BoundMethod(method, run, inspect.iscoroutinefunction(run))
            if isinstance(method, Stream) and not inspect.isasyncgenfunction(run):
                raise ConfigError(
                    f"{type(actor).__name__}.{name} streams, so it must be an async generator"
                )
    offered = actor.interface.methods
    for missing in offered.keys() - bound.keys():
        raise ConfigError(f"{type(actor).__name__} does not implement {offered[missing].label}")
    for method_name, entry in bound.items():
        if offered.get(method_name) is not entry.method:
            raise ConfigError(
                f"{type(actor).__name__} implements {entry.method.label}, which is not in its "
                "interface"
            )
    return bound
