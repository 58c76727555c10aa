"""Objects across two jails: tests in one use a solution's objects in the other over a pipe.

Plain data crosses by value, rebuilt from built-in types. Everything else stays where it is and is
named by a number. The side with the tests may do all that `OPERATIONS` has to the solution's
objects; the solution may only call, or iterate over, what it was handed.

Where a test expects plain data, an object that answers yes to everything must not pass. So a
verdict (`==`, `<`, `in`, arithmetic) is asked of the solution only about an instance that the test
itself made, by calling a name of the solution that begins with a capital: there the class is what
is tested. Any other object equals nothing but itself, and takes no part in the rest; and no object
at all is equal to data, or above or below it.
"""

from __future__ import annotations

import builtins
from typing import Any, Callable

from . import frames

CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
DEPTH = 50

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, args, kwargs: target(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "del": delattr,
    "len": len,
    "iter": iter,
    "next": next,
    "item": lambda target, key: target[key],
    "set_item": lambda target, key, value: target.__setitem__(key, value),
    "del_item": lambda target, key: target.__delitem__(key),
    "in": lambda target, value: value in target,
    "bool": bool,
    "repr": repr,
    "str": str,
    "instance": lambda target, value: isinstance(value, target),
    "enter": lambda target: target.__enter__(),
    "exit": lambda target: target.__exit__(None, None, None),
    "operator": lambda target, name, *others: _operated(target, name, *others),
}
GIVEN = ("call", "iter", "next")  # to a solution: of functions and iterators that it was handed
ARITHMETIC = [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
    "radd",
    "rsub",
    "rmul",
    "rtruediv",
]
ORDER = ["eq", "lt", "le", "gt", "ge"]
CONVERSIONS = ["neg", "pos", "abs", "invert", "int", "float", "index", "round"]


class Failed(Exception):
    """What the solution raised, where no built-in exception is closer."""


class Side:
    """One end of the pipe."""

    def __init__(self, fd: int, trusted: bool) -> None:
        self._fd, self._trusted = fd, trusted
        self._kept: list[Any] = []
        self._asked = 0
        self.used = False  # more was asked of the other side than what there is
        self.failed = False  # the other side has raised something, or spoken garbage
        self._numbers: dict[int, int] = {}

    # -- values

    def packed(self, value: Any, depth: int = 0) -> Any:
        if depth > DEPTH:
            raise ValueError(f"a value nested deeper than {DEPTH}")
        for kind in (bool, int, float, str):
            if isinstance(value, kind):
                return ["value", kind(value)]
        if value is None:
            return ["value", None]
        if isinstance(value, (bytes, bytearray)):
            return ["bytes", bytes(value).hex()]
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, dict):
            pairs = list(dict.items(value))
            return ["dict", [[self.packed(x, depth + 1) for x in pair] for pair in pairs]]
        for name, container in CONTAINERS.items():
            if isinstance(value, container):
                items = list(container.__iter__(value))
                return [name, [self.packed(item, depth + 1) for item in items]]
        if isinstance(value, Remote):
            return ["yours", place_of(value).number]
        return ["mine", self._keep(value), type(value).__name__]

    def unpacked(self, packed: Any, depth: int = 0) -> Any:
        if depth > DEPTH:
            raise ValueError(f"a value nested deeper than {DEPTH}")
        kind, *rest = packed
        if kind == "value" and (rest[0] is None or type(rest[0]) in (bool, int, float, str)):
            return rest[0]
        if kind == "bytes":
            return bytes.fromhex(rest[0])
        if kind == "complex":
            return complex(float(rest[0]), float(rest[1]))
        if kind == "dict":
            return {self.unpacked(k, depth + 1): self.unpacked(v, depth + 1) for k, v in rest[0]}
        if kind in CONTAINERS:
            return CONTAINERS[kind]([self.unpacked(item, depth + 1) for item in rest[0]])
        if kind == "yours":
            return self._kept[int(rest[0])]
        if kind == "mine":
            return Remote(self, int(rest[0]), str(rest[1])[:80])
        raise ValueError(f"a value of kind {kind!r:.40}")

    def _keep(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._kept)
            self._kept.append(value)
        return number

    # -- asking

    def ask(self, operation: str, number: int, *arguments: Any) -> Any:
        """What the other side answers; its exceptions are raised here, as built-in ones."""
        sent = [self.packed(argument) for argument in arguments]
        self._asked += 1
        self.used = self.used or operation != "get"
        asked = self._asked
        frames.send(self._fd, {"do": operation, "to": number, "with": sent, "asked": asked})
        while True:
            frame = frames.receive(self._fd)
            try:
                if not isinstance(frame, dict):
                    raise ValueError("a frame that is no object")
                if "do" not in frame:
                    if frame["asked"] != asked:
                        raise ValueError("an answer to something else")
                    error, value = self._heard(frame, arguments)
                    break
            except Exception:  # whatever garbage makes of our reading it
                self.failed = True
                raise frames.Closed("an answer that is none") from None
            self._answer(frame)
        if error is not None:
            self.failed = True
            raise error
        return value

    def _heard(self, frame: Any, arguments: tuple[Any, ...]) -> tuple[BaseException | None, Any]:
        """(what the other side has raised, what it has answered)."""
        self._changed(arguments, frame.get("changed", []))
        if "raised" in frame:
            return self._exception(frame["raised"]), None
        return None, self.unpacked(frame["value"])

    def _changed(self, arguments: tuple[Any, ...], changed: list[Any]) -> None:
        """Mutable arguments take on what the call has made of them."""
        for target, packed in zip(_mutable(arguments), changed):
            new = self.unpacked(packed)
            if type(new) is not type(target) or new == target:
                continue
            if isinstance(target, list):
                target[:] = new
            else:
                target.clear()
                target.update(new)

    def _exception(self, raised: Any) -> BaseException:
        names, text, number = raised
        kinds = (getattr(builtins, str(name), None) for name in names)
        kind = next((k for k in kinds if isinstance(k, type) and issubclass(k, Exception)), Failed)
        try:
            error: BaseException = kind(str(text))
        except TypeError:  # UnicodeDecodeError and the like take more
            error = Failed(str(text))
        error.remote = Remote(self, int(number), "exception")  # type: ignore[attr-defined]
        return error

    # -- answering

    def serve(self) -> None:
        while True:
            self._answer(frames.receive(self._fd))

    def _answer(self, frame: Any) -> None:
        arguments: list[Any] = []
        try:
            operation = frame["do"]
            if self._trusted and operation not in GIVEN:
                raise PermissionError(f"a solution may not {operation} what belongs to its tests")
            target = self._kept[frame["to"]]
            arguments = [self.unpacked(argument) for argument in frame["with"]]
            answer = {"value": self.packed(OPERATIONS[operation](target, *arguments))}
        except frames.Closed:
            raise
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            answer = {"raised": [names, _text(error), self._keep(error)]}
        answer["asked"] = frame.get("asked")
        if not self._trusted:
            answer["changed"] = [self.packed(value) for value in _mutable(tuple(arguments))]
        frames.send(self._fd, answer)


class Remote:
    """An object of the other jail. `makes`: calling it gives instances that verdicts may be asked
    about; `made`: it is one.
    """

    def __init__(self, side: Side, number: int, kind: str) -> None:
        object.__setattr__(self, "_remote", _Place(side, number, kind))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return place_of(self).ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        place_of(self).ask("set", name, value)

    def __delattr__(self, name: str) -> None:
        place_of(self).ask("del", name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        place = place_of(self)
        value = place.ask("call", list(args), kwargs)
        if place.makes and isinstance(value, Remote):
            place_of(value).made = True
        return value

    def __hash__(self) -> int:
        return hash(("remote", place_of(self).number))

    def __len__(self) -> int:
        return int(place_of(self).ask("len"))

    def __iter__(self) -> Any:
        return place_of(self).ask("iter")

    def __next__(self) -> Any:
        return place_of(self).ask("next")

    def __getitem__(self, key: Any) -> Any:
        return place_of(self).ask("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        place_of(self).ask("set_item", key, value)

    def __delitem__(self, key: Any) -> None:
        place_of(self).ask("del_item", key)

    def __contains__(self, value: Any) -> bool:
        if not place_of(self).made:
            raise TypeError(f"`in` of a {place_of(self).kind} of the solution, where data was due")
        return bool(place_of(self).ask("in", value))

    def __bool__(self) -> bool:
        return bool(place_of(self).ask("bool"))

    def __repr__(self) -> str:
        return str(place_of(self).ask("repr"))

    def __str__(self) -> str:
        return str(place_of(self).ask("str"))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and bool(place_of(self).ask("instance", value))

    def __enter__(self) -> Any:
        return place_of(self).ask("enter")

    def __exit__(self, *error: Any) -> None:
        place_of(self).ask("exit")


class _Place:
    """Where an object is, and what may be asked about it."""

    def __init__(self, side: Side, number: int, kind: str) -> None:
        self.side, self.number, self.kind = side, number, kind
        self.makes = self.made = False

    def ask(self, operation: str, *arguments: Any) -> Any:
        return self.side.ask(operation, self.number, *arguments)


def place_of(target: Remote) -> _Place:
    place: _Place = object.__getattribute__(target, "_remote")
    return place


def _made(value: Any) -> bool:
    return isinstance(value, Remote) and place_of(value).made


def _verdict(name: str) -> Callable[..., Any]:
    def operator(self: Remote, other: Any) -> Any:
        if not isinstance(other, Remote):  # data was due
            return False if name == "eq" else NotImplemented
        if _made(self) or _made(other):
            return place_of(self).ask("operator", f"__{name}__", other)
        return place_of(self).number == place_of(other).number if name == "eq" else NotImplemented

    return operator


def _arithmetic(name: str) -> Callable[..., Any]:
    def operator(self: Remote, other: Any) -> Any:
        if not (_made(self) or _made(other)):
            return NotImplemented
        value = place_of(self).ask("operator", f"__{name}__", other)
        if isinstance(value, Remote):
            place_of(value).made = True
        elif not isinstance(other, Remote):  # it has seen what is perhaps the expected value
            raise TypeError(f"data for {name} of an object of the solution and data")
        return value

    return operator


def _conversion(name: str) -> Callable[..., Any]:
    def operator(self: Remote, *others: Any) -> Any:
        return place_of(self).ask("operator", f"__{name}__", *others)

    return operator


for _names, _make in ((ORDER, _verdict), (ARITHMETIC, _arithmetic), (CONVERSIONS, _conversion)):
    for _name in _names:
        setattr(Remote, f"__{_name}__", _make(_name))


def _mutable(arguments: Any) -> list[Any]:
    """Lists, dicts and sets among the arguments of a call, those inside of others left out."""
    found = []
    for argument in arguments:
        if type(argument) in (list, dict, set):
            found.append(argument)
    if len(arguments) == 2 and type(arguments[0]) is list and type(arguments[1]) is dict:
        # args and kwargs of "call": what they hold, not they themselves
        inner = [*arguments[0], *arguments[1].values()]
        return [argument for argument in inner if type(argument) in (list, dict, set)]
    return found


def _operated(target: Any, name: str, *others: Any) -> Any:
    value = getattr(target, name)(*others)
    if value is not NotImplemented:
        return value
    if name == "__eq__":
        return target is others[0]
    raise TypeError(f"{type(target).__name__} has no {name} with {type(others[0]).__name__}")


def _text(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except BaseException:
        return ""


def serve(fd: int, load: Callable[[], Any]) -> None:
    """The solution's end: loads it, and does what its tests ask for, its module being number 0."""
    side = Side(fd, trusted=False)
    module = load()
    side._keep(module)
    frames.send(fd, {"ready": True})
    side.serve()
