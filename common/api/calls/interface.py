"""Declares the interface of a service: message types and a method table, no logic."""

from __future__ import annotations

from typing import ClassVar, Generic, TypeVar

from meshrl.common.base.encoding.messages import message

Q = TypeVar("Q")
R = TypeVar("R")


class Method(Generic[Q]):
    """One entry of an interface; it knows its own name once the class is made."""

    name: str = ""  # as the attribute is called: what crosses the wire
    label: str = ""  # "Weights.stage_version": what people read

    def __init__(self, request: type[Q]) -> None:
        self.request = request

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.label = f"{owner.__name__}.{name}"


class Call(Method[Q], Generic[Q, R]):
    """One request, one reply; a plain value says what needs no name,
    NoneType nothing. `idempotent`: safe to run twice,
    so a lost peer is asked again within the deadline.
    """

    def __init__(
        self, request: type[Q], reply: type[R], deadline_s: float = 10.0, idempotent: bool = False
    ) -> None:
        super().__init__(request)
        self.reply = reply
        self.deadline_s = deadline_s
        self.idempotent = idempotent


class Stream(Method[Q], Generic[Q, R]):
    """One request, many replies. `idle_s`: the longest wait for the next one. `credits`: how many
    may be under way.
    """

    def __init__(
        self, request: type[Q], reply: type[R], idle_s: float = 30.0, credits: int = 64
    ) -> None:
        super().__init__(request)
        self.reply = reply
        self.idle_s = idle_s
        self.credits = credits


class Cast(Method[Q]):
    """One request without a reply, which may be lost."""


class Interface:
    """Base of every service's method table; see common/api."""

    methods: ClassVar[dict[str, Method[object]]] = {}

    def __init_subclass__(cls) -> None:
        own = {k: v for k, v in vars(cls).items() if isinstance(v, Method)}
        cls.methods = {**cls.methods, **own}


@message
class ChangeHint:
    """A hint to read the state again. It carries no orders, so losing it is harmless."""

    subject: str  # what changed, for the log
