"""Plain data across a pipe: by value, rebuilt from types of Python and its standard library.

Repeated references to one list in a message stay so on the other side. A call's changes to its
arguments are sent by the containers' positions in the message.
"""

from __future__ import annotations

import builtins
import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, Callable

MAX_SHARED_ITEMS = 1000  # largest container whose later changes are sent
MAX_SHARED_CONTAINERS = 256  # containers whose changes are detected
DEPTH = 200
MAX_PLAIN_INT = 1 << 62  # larger numbers cross as hexadecimal digits, of any number

# Mutable types, with positions in a message. Each with how it is emptied and filled.
SEQUENCES = {"list": list, "deque": deque, "set": set, "bytearray": bytearray}
MAPPINGS = {kind.__name__: kind for kind in (dict, OrderedDict, Counter, defaultdict)}
MUTABLE: dict[Any, str] = {kind: name for name, kind in [*SEQUENCES.items(), *MAPPINGS.items()]}
IMMUTABLE = {"tuple": tuple, "frozenset": frozenset}

# Types of the standard library, by module, with the parts of their values.
LIBRARY_TYPES: dict[tuple[str, str], Callable[[Any], list[Any]]] = {
    ("decimal", "Decimal"): lambda v: [str(v)],
    ("fractions", "Fraction"): lambda v: [v.numerator, v.denominator],
    ("datetime", "date"): lambda v: [v.year, v.month, v.day],
    ("datetime", "time"): lambda v: [v.hour, v.minute, v.second, v.microsecond, v.tzinfo],
    ("datetime", "datetime"): lambda v: [
        *(v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo)
    ],
    ("datetime", "timedelta"): lambda v: [v.days, v.seconds, v.microseconds],
    ("datetime", "timezone"): lambda v: list(v.__getinitargs__()),
    ("uuid", "UUID"): lambda v: [str(v)],
    ("pathlib", "PosixPath"): lambda v: [str(v)],
    ("pathlib", "PurePosixPath"): lambda v: [str(v)],
    ("re", "Pattern"): lambda v: [v.pattern, v.flags],
    ("builtins", "range"): lambda v: [v.start, v.stop, v.step],
    ("builtins", "slice"): lambda v: [v.start, v.stop, v.step],
    ("zoneinfo", "ZoneInfo"): lambda v: [v.key],
    ("ipaddress", "IPv4Address"): lambda v: [str(v)],
    ("ipaddress", "IPv6Address"): lambda v: [str(v)],
}
# Data types that a class may derive from, and access to the data whatever the class overrides: its
# instances cross as data, and as objects.
DATA_BASES: dict[Any, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__index__,
    float: float.__float__,
    complex: lambda v: complex(v.real, v.imag),
    bytes: lambda v: bytes.__add__(v, b""),
    tuple: lambda v: tuple(tuple.__iter__(v)),
    frozenset: lambda v: frozenset(frozenset.__iter__(v)),
}
CONTAINER_TYPES: tuple[Any, ...] = (list, dict, set, deque, bytearray)
SINGLE = {"Ellipsis": ..., "NotImplemented": NotImplemented}
DATA = (type(None), bool, int, float, complex, str, bytes, bytearray)


def extract_data(value: Any) -> Any:
    """Return the data in an instance of a class that derives from one of `BASES`; None for
    others.
    """
    return next((get(value) for kind, get in DATA_BASES.items() if isinstance(value, kind)), None)


# Types that cross by name: the same in both jails.
TYPES_BY_NAME: dict[str, type[Any]] = {
    name: value
    for name, value in vars(builtins).items()
    if isinstance(value, type) and not name.startswith("_")
}
for _kind in (deque, OrderedDict, defaultdict, Counter, type(None)):
    TYPES_BY_NAME[_kind.__name__] = _kind
NAMES_BY_TYPE = {kind: name for name, kind in TYPES_BY_NAME.items()}


def find_library_type(value: Any) -> tuple[str, str] | None:
    """Return the module and name of a library type whose values cross as their parts."""
    kind = type(value)
    key = (kind.__module__.split(".")[0], kind.__name__)
    return (
        key
        if key in LIBRARY_TYPES and getattr(sys.modules.get(key[0]), key[1], None) is kind
        else None
    )


class MessageCodec:
    """Codec of a request and its answer."""

    def __init__(self, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        """Create a codec; `pack` and `unpack` convert values that are no data."""
        self._pack, self._unpack = pack, unpack
        self.containers: list[Any] = []
        self._places: dict[int, int] = {}
        self._before: list[list[Any]] = []

    # -- encoding

    def packed(self, value: Any, depth: int = 0) -> Any:
        if depth > DEPTH:
            raise ValueError(f"a value nested deeper than {DEPTH}")
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return ["value", value]
        if kind is int:
            return (
                ["value", value] if -MAX_PLAIN_INT < value < MAX_PLAIN_INT else ["int", hex(value)]
            )
        if kind in MUTABLE:
            return self._container(value, depth)
        if kind in (bytes, memoryview):
            return ["bytes", bytes(value).hex()]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind is tuple or kind is frozenset:
            return [kind.__name__, [self.packed(item, depth + 1) for item in value]]
        if kind is type and value in NAMES_BY_TYPE:
            return ["type", NAMES_BY_TYPE[value]]
        key = find_library_type(value)
        if key is not None:
            return [
                "of",
                *key,
                [self.packed(part, depth + 1) for part in LIBRARY_TYPES[key](value)],
            ]
        for name, single in SINGLE.items():
            if value is single:
                return ["single", name]
        return self._pack(self, value, depth)

    def _container(self, value: Any, depth: int) -> Any:
        place = self._places.get(id(value))
        if place is not None:
            return ["again", place]
        live = self._pack(self, value, depth)  # one that both sides have by its number
        if live is not None:
            return live
        self._register(value)
        return [MUTABLE[type(value)], *self.content(value, depth)]

    def content(self, value: Any, depth: int = 0) -> list[Any]:
        """Return the packed content of a container."""
        name = MUTABLE[type(value)]
        if name == "bytearray":
            return [bytes(value).hex()]
        if name in MAPPINGS:
            pairs = [
                [self.packed(key, depth + 1), self.packed(item, depth + 1)]
                for key, item in dict.items(value)
            ]
            if name != "defaultdict":
                return [pairs]
            return [pairs, self.packed(value.default_factory, depth + 1)]
        items = [self.packed(item, depth + 1) for item in value]
        return [items, value.maxlen] if name == "deque" else [items]

    def _register(self, container: Any) -> None:
        self._places[id(container)] = len(self.containers)
        self.containers.append(container)

    # -- decoding

    def unpacked(self, packed: Any, depth: int = 0) -> Any:
        if depth > DEPTH:
            raise ValueError(f"a value nested deeper than {DEPTH}")
        kind, *rest = packed
        if kind == "value" and (rest[0] is None or type(rest[0]) in (bool, int, float, str)):
            return rest[0]
        if kind == "int":
            return int(rest[0], 16)
        if kind == "again":
            return self.containers[abs(int(rest[0]))]
        if kind in SEQUENCES or kind in MAPPINGS:
            made: Any = {**SEQUENCES, **MAPPINGS}[kind]()
            if kind == "deque":
                made = deque(maxlen=rest[1])
            self._register(made)
            self.fill(made, rest, depth)
            if kind == "defaultdict":
                made.default_factory = self.unpacked(rest[1], depth + 1)
            return made
        if kind == "bytes":
            return bytes.fromhex(rest[0])
        if kind == "complex":
            return complex(float(rest[0]), float(rest[1]))
        if kind in IMMUTABLE:
            return IMMUTABLE[kind]([self.unpacked(item, depth + 1) for item in rest[0]])
        if kind == "type":
            return TYPES_BY_NAME[rest[0]]
        if kind == "single":
            return SINGLE[rest[0]]
        if kind == "of" and (rest[0], rest[1]) in LIBRARY_TYPES:
            parts = [self.unpacked(part, depth + 1) for part in rest[2]]
            if rest[0] == "re":
                return __import__("re").compile(*parts)
            return getattr(__import__(rest[0]), rest[1])(*parts)
        return self._unpack(self, packed, depth)

    def fill(self, made: Any, rest: Any, depth: int = 0) -> None:
        """Replace the content of a container by what `content` has packed."""
        kind = MUTABLE[type(made)]
        if kind == "bytearray":
            made[:] = bytes.fromhex(rest[0])
        elif kind in MAPPINGS:
            pairs = [
                (self.unpacked(key, depth + 1), self.unpacked(item, depth + 1))
                for key, item in rest[0]
            ]
            dict.clear(made)
            for key, item in pairs:
                made[key] = item
        else:
            items = [self.unpacked(item, depth + 1) for item in rest[0]]
            made.clear()
            (made.update if kind == "set" else made.extend)(items)

    # -- changes by a call

    def remember(self) -> None:
        """Record the containers when the request has been read; `changed` returns later changes."""
        self._before = [read_state(container) for container in self.containers]

    def changed(self) -> list[Any]:
        """Return [position, content] of each changed container of the request."""
        found = []
        for late in self.containers[len(self._before) :]:  # of an answer that was not sent
            del self._places[id(late)]
        del self.containers[len(self._before) :]
        for place, before in enumerate(self._before):
            container = self.containers[place]
            if not is_same_state(read_state(container), before):
                found.append([place, self.content(container)])
        return found

    def held(self) -> list[int]:
        """Return the positions of the containers, if others than this message refer to any of them.

        What the other side does to them is then done here. Long ones are excluded, as comparing
        them takes long.
        """
        self._before = []
        probe: list[list[Any]] = [[]]
        most = sys.getrefcount(probe[0]) + 1  # one more for a parent, or the caller
        places = range(len(self.containers))
        if all(sys.getrefcount(self.containers[place]) <= most for place in places):
            return []
        return [place for place in places if len(self.containers[place]) <= MAX_SHARED_ITEMS]

    def change(self, changed: Any) -> None:
        """Apply the other side's changes to our containers."""
        for place, content in changed:
            self.fill(self.containers[abs(int(place))], content)


def read_state(container: Any) -> list[Any]:
    if isinstance(container, bytearray):
        return [bytes(container)]
    if isinstance(container, dict):
        return [part for pair in dict.items(container) for part in pair]
    return list(container)


def is_same_state(one: list[Any], other: list[Any]) -> bool:
    if one and isinstance(one[0], bytes) and len(one) == 1:
        return one == other
    return len(one) == len(other) and all(map(operator.is_, one, other))


class SharedContainers:
    """Containers that the solution refers to: shared by both sides, and crossing by number.

    Each is stored as both sides last saw it.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, list[Any]]] = {}  # by number
        self._places: dict[int, int] = {}  # their numbers, by the containers' ids here

    def number(self, container: Any) -> Any:
        """Return the number of a container; None if it has none."""
        return self._places.get(id(container))

    def container(self, number: int) -> Any:
        return self._known[number][0]

    def share(self, held: list[tuple[int, Any]]) -> None:
        """Let containers cross by number. Both sides forget the same ones, the oldest."""
        for number, container in held:
            if number in self._known:
                self._places.pop(id(self._known[number][0]), None)
            self._known[number] = (container, read_state(container))
            self._places[id(container)] = number
        while len(self._known) > MAX_SHARED_CONTAINERS:
            container, _ = self._known.pop(next(iter(self._known)))
            self._places.pop(id(container), None)

    def changes(self, message: MessageCodec) -> list[Any]:
        """Return [number, content] of those that changed here since the other side last saw
        them.
        """
        found = []
        for number, (container, before) in list(self._known.items()):
            now = read_state(container)
            if not is_same_state(now, before):
                found.append([number, message.content(container)])
                self._known[number] = (container, now)
        return found

    def change(self, changes: Any, message: MessageCodec) -> None:
        """Apply the other side's changes to them."""
        for number, content in changes:
            container = self.container(int(number))
            message.fill(container, content)
            self._known[int(number)] = (container, read_state(container))
