"""A module that stands for a solution while its tests are collected: every name is there, and
whatever more is asked of it is counted.

What tests there are is known so before any program has a say in it.
"""

from __future__ import annotations

import types
from typing import Any, NoReturn


class Uses:
    """How often more was asked of a placeholder than a name."""

    count = 0


class PlaceholderUsed(Exception):
    """The tests need the solution's values to be collected."""


def _refused(name: str) -> Any:
    def operation(self: Any, *_: Any) -> NoReturn:
        uses.count += 1
        raise PlaceholderUsed(f"{name} of what the solution has")

    return operation


uses = Uses()
NONE = ("pytestmark", "_pytestfixturefunction")  # what pytest looks for in all that it finds
_VALUES = (
    "__iter__ __next__ __len__ __getitem__ __contains__ __bool__ __int__ __float__ __index__ "
    "__lt__ __le__ __gt__ __ge__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __enter__"
)


class _StandInClass(type):
    """Of classes, as tests may inherit from what they import."""

    @property
    def __test__(cls) -> bool:
        return "_stands" not in vars(cls)  # it is no test itself, but one may inherit from it

    def __getattr__(cls, name: str) -> Any:
        return _attribute(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_stands" not in vars(cls):
            return super().__call__(*args, **kwargs)
        uses.count += 1
        return object.__new__(_Value)


class _Value(metaclass=_StandInClass):
    """What stands for any one object."""

    _stands = True

    def __getattr__(self, name: str) -> Any:
        return _attribute(name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        uses.count += 1
        return object.__new__(_Value)


def _attribute(name: str) -> Any:
    if name.startswith("__") or name in NONE:
        raise AttributeError(name)
    return _made(name)


for _name in _VALUES.split():
    setattr(_Value, _name, _refused(_name))
    setattr(_StandInClass, _name, _refused(_name))


def _made(name: str) -> Any:
    return _StandInClass(name, (_Value,), {"_stands": True})


class Module(types.ModuleType):
    """The module, of which everything can be imported but everything at once (`*`)."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__dict__["uses"] = uses

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            uses.count += 1
            raise PlaceholderUsed("all names of the solution")
        if name.startswith("__"):
            raise AttributeError(name)
        return _made(name)
