"""Codec of plain data: values are rebuilt from types of Python and its standard library.

A list that a message contains twice is one list on the other side, too. A call's changes to its
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
MAX_DEPTH = 200  # of nested values
MAX_PLAIN_INT = 1 << 62  # larger numbers cross as hexadecimal digits, of any number

# Mutable types, whose values have a position in a message.
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
# Data types from which a class may derive, with functions that return the data whatever the class
# overrides. Its instances cross both as data and as objects.
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
    """Return the data of an instance of a class derived from one of `DATA_BASES`, or None."""
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

    def __init__(
        self,
        pack_other: Callable[[MessageCodec, Any, int], Any],
        unpack_other: Callable[[MessageCodec, Any, int], Any],
    ) -> None:
        """Create a codec; `pack_other` and `unpack_other` convert values that are not data."""
        self._pack_other, self._unpack_other = pack_other, unpack_other
        self.containers: list[Any] = []  # of the message, in the order of their positions
        self._indices: dict[int, int] = {}  # their positions, by their ids
        self._states_before: list[list[Any]] = []  # see `record_states`

    # -- encoding

    def pack(self, value: Any, depth: int = 0) -> Any:
        """Return a value as [kind, part, ...] for JSON."""
        if depth > MAX_DEPTH:
            raise ValueError(f"a value nested deeper than {MAX_DEPTH}")
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return ["value", value]
        if kind is int:
            return (
                ["value", value] if -MAX_PLAIN_INT < value < MAX_PLAIN_INT else ["int", hex(value)]
            )
        if kind in MUTABLE:
            return self._pack_container(value, depth)
        if kind in (bytes, memoryview):
            return ["bytes", bytes(value).hex()]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind is tuple or kind is frozenset:
            return [kind.__name__, [self.pack(item, depth + 1) for item in value]]
        if kind is type and value in NAMES_BY_TYPE:
            return ["type", NAMES_BY_TYPE[value]]
        key = find_library_type(value)
        if key is not None:
            return ["of", *key, [self.pack(part, depth + 1) for part in LIBRARY_TYPES[key](value)]]
        for name, single in SINGLE.items():
            if value is single:
                return ["single", name]
        return self._pack_other(self, value, depth)

    def _pack_container(self, value: Any, depth: int) -> Any:
        index = self._indices.get(id(value))
        if index is not None:
            return ["again", index]
        shared = self._pack_other(self, value, depth)  # a container that both sides share
        if shared is not None:
            return shared
        self._register(value)
        return [MUTABLE[type(value)], *self.pack_content(value, depth)]

    def pack_content(self, value: Any, depth: int = 0) -> list[Any]:
        """Return the packed content of a container."""
        name = MUTABLE[type(value)]
        if name == "bytearray":
            return [bytes(value).hex()]
        if name in MAPPINGS:
            pairs = [
                [self.pack(key, depth + 1), self.pack(item, depth + 1)]
                for key, item in dict.items(value)
            ]
            if name != "defaultdict":
                return [pairs]
            return [pairs, self.pack(value.default_factory, depth + 1)]
        items = [self.pack(item, depth + 1) for item in value]
        return [items, value.maxlen] if name == "deque" else [items]

    def _register(self, container: Any) -> None:
        self._indices[id(container)] = len(self.containers)
        self.containers.append(container)

    # -- decoding

    def unpack(self, packed: Any, depth: int = 0) -> Any:
        """Return the value that `pack` of the other side has packed; any error for invalid data."""
        if depth > MAX_DEPTH:
            raise ValueError(f"a value nested deeper than {MAX_DEPTH}")
        kind, *rest = packed
        if kind == "value" and (rest[0] is None or type(rest[0]) in (bool, int, float, str)):
            return rest[0]
        if kind == "int":
            return int(rest[0], 16)
        if kind == "again":
            return self.containers[abs(int(rest[0]))]
        if kind in SEQUENCES or kind in MAPPINGS:
            container: Any = {**SEQUENCES, **MAPPINGS}[kind]()
            if kind == "deque":
                container = deque(maxlen=rest[1])
            self._register(container)
            self.fill_container(container, rest, depth)
            if kind == "defaultdict":
                container.default_factory = self.unpack(rest[1], depth + 1)
            return container
        if kind == "bytes":
            return bytes.fromhex(rest[0])
        if kind == "complex":
            return complex(float(rest[0]), float(rest[1]))
        if kind in IMMUTABLE:
            return IMMUTABLE[kind]([self.unpack(item, depth + 1) for item in rest[0]])
        if kind == "type":
            return TYPES_BY_NAME[rest[0]]
        if kind == "single":
            return SINGLE[rest[0]]
        if kind == "of" and (rest[0], rest[1]) in LIBRARY_TYPES:
            parts = [self.unpack(part, depth + 1) for part in rest[2]]
            if rest[0] == "re":
                return __import__("re").compile(*parts)
            return getattr(__import__(rest[0]), rest[1])(*parts)
        return self._unpack_other(self, packed, depth)

    def fill_container(self, container: Any, parts: Any, depth: int = 0) -> None:
        """Replace the content of a container by what `pack_content` has returned."""
        kind = MUTABLE[type(container)]
        if kind == "bytearray":
            container[:] = bytes.fromhex(parts[0])
        elif kind in MAPPINGS:
            pairs = [
                (self.unpack(key, depth + 1), self.unpack(item, depth + 1))
                for key, item in parts[0]
            ]
            dict.clear(container)
            for key, item in pairs:
                container[key] = item
        else:
            items = [self.unpack(item, depth + 1) for item in parts[0]]
            container.clear()
            (container.update if kind == "set" else container.extend)(items)

    # -- changes by a call

    def record_states(self) -> None:
        """Record the containers' states once the request is decoded; see `collect_changes`."""
        self._states_before = [read_state(container) for container in self.containers]

    def collect_changes(self) -> list[Any]:
        """Return [position, content] of each container that changed since `record_states`."""
        changes = []
        for unsent in self.containers[len(self._states_before) :]:  # of an answer that failed
            del self._indices[id(unsent)]
        del self.containers[len(self._states_before) :]
        for index, before in enumerate(self._states_before):
            container = self.containers[index]
            if not is_same_state(read_state(container), before):
                changes.append([index, self.pack_content(container)])
        return changes

    def find_retained(self) -> list[int]:
        """Return the positions of the containers, if objects outside of this message refer to any.

        The other side's later changes to such containers are applied here. Long ones are excluded,
        as their comparison takes long.
        """
        self._states_before = []
        probe: list[list[Any]] = [[]]
        most = sys.getrefcount(probe[0]) + 1  # one more for a parent, or the caller
        indices = range(len(self.containers))
        if all(sys.getrefcount(self.containers[index]) <= most for index in indices):
            return []
        return [index for index in indices if len(self.containers[index]) <= MAX_SHARED_ITEMS]

    def apply_changes(self, changes: Any) -> None:
        """Apply the other side's changes to our containers."""
        for index, content in changes:
            self.fill_container(self.containers[abs(int(index))], content)


def read_state(container: Any) -> list[Any]:
    if isinstance(container, bytearray):
        return [bytes(container)]
    if isinstance(container, dict):
        return [part for pair in dict.items(container) for part in pair]
    return list(container)


def is_same_state(state: list[Any], other: list[Any]) -> bool:
    if state and isinstance(state[0], bytes) and len(state) == 1:
        return state == other
    return len(state) == len(other) and all(map(operator.is_, state, other))


class SharedContainers:
    """Containers that the solution refers to; both sides share them and send their numbers.

    Each is stored with its state at the last exchange.
    """

    def __init__(self) -> None:
        self._containers: dict[int, tuple[Any, list[Any]]] = {}  # with state, by number
        self._numbers: dict[int, int] = {}  # by the containers' ids

    def get_number(self, container: Any) -> int | None:
        """Return the number of a container; None if it has none."""
        return self._numbers.get(id(container))

    def get_container(self, number: int) -> Any:
        return self._containers[number][0]

    def share(self, containers: list[tuple[int, Any]]) -> None:
        """Add containers with their numbers. Both sides remove the same ones, the oldest."""
        for number, container in containers:
            if number in self._containers:
                self._numbers.pop(id(self._containers[number][0]), None)
            self._containers[number] = (container, read_state(container))
            self._numbers[id(container)] = number
        while len(self._containers) > MAX_SHARED_CONTAINERS:
            container, _ = self._containers.pop(next(iter(self._containers)))
            self._numbers.pop(id(container), None)

    def collect_changes(self, codec: MessageCodec) -> list[Any]:
        """Return [number, content] of each container that changed since the last exchange."""
        changes = []
        for number, (container, before) in list(self._containers.items()):
            now = read_state(container)
            if not is_same_state(now, before):
                changes.append([number, codec.pack_content(container)])
                self._containers[number] = (container, now)
        return changes

    def apply_changes(self, changes: Any, codec: MessageCodec) -> None:
        """Apply the other side's changes to the containers."""
        for number, content in changes:
            container = self.get_container(int(number))
            codec.fill_container(container, content)
            self._containers[int(number)] = (container, read_state(container))
