"""Declaration of a service's interface: message types and a method table, no logic."""

from __future__ import annotations

from typing import ClassVar, Generic, TypeVar

from meshrl.common.base.encoding.messages import message

Q = TypeVar("Q")
R = TypeVar("R")


class Method(Generic[Q]):
    """Entry of an interface. Its name is set when the class is created."""

    name: str = ""  # name of the attribute, sent with each request
    label: str = ""  # "Weights.stage_version", for users

    def __init__(self, request: type[Q]) -> None:
        self.request = request

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.label = f"{owner.__name__}.{name}"


class Call(Method[Q], Generic[Q, R]):
    """One request, one reply.

    A single value needs no message class; NoneType is an empty message. `idempotent`: safe to run
    twice, so a call to a lost peer is repeated within the deadline.
    """

    def __init__(
        self, request: type[Q], reply: type[R], deadline_s: float = 10.0, idempotent: bool = False
    ) -> None:
        super().__init__(request)
        self.reply = reply
        self.deadline_s = deadline_s
        self.idempotent = idempotent


class Stream(Method[Q], Generic[Q, R]):
    """One request, many replies.

    `idle_s`: the longest wait for the next one. `credits`: maximum number in flight.
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
    """Hint to read the state again. It carries no orders, so losing it is harmless."""

    subject: str  # what changed, for the log
