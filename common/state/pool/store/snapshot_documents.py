"""JSON documents of pool snapshots, for what-if questions and bug reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from meshrl.common.base.errors import Refused
from meshrl.common.base.type_hints import resolve_hints
from meshrl.common.state.pool.scheduling.snapshot import PoolSnapshot


def encode_snapshot(snapshot: PoolSnapshot) -> dict[str, Any]:
    """Return the snapshot as a JSON document."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(snapshot), default=sorted))
    return found


def decode_snapshot(document: Mapping[str, Any]) -> PoolSnapshot:
    """Return the snapshot that a document describes; missing fields get their defaults.

    Refused for an unknown field or a missing required field.
    """
    found: PoolSnapshot = _decode_value(PoolSnapshot, document, "the snapshot")
    return found


def _decode_value(kind: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return _decode_record(kind, value, where)
    if origin in (Union, UnionType):
        member = next(one for one in inner if one is not NoneType)
        return None if value is None else _decode_value(member, value, where)
    if origin is tuple:
        return tuple(_decode_value(inner[0], one, f"{where}[{n}]") for n, one in enumerate(value))
    if origin is frozenset:
        return frozenset(value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key = inner[0]
        return {
            key(name): _decode_value(inner[1], one, f"{where}.{name}")
            for name, one in value.items()
        }
    return kind(value) if isinstance(kind, type) and issubclass(kind, Enum) else value


def _decode_record(kind: type[Any], value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise Refused(f"{where} is not an object", where=where, fix="Give its fields by name")
    hints = resolve_hints(kind)
    names = [field.name for field in fields(kind) if field.init]
    unknown = sorted(set(value) - set(names))
    if unknown:
        fix = f"Choose from {', '.join(names)}"
        raise Refused(f"{where} has no {', '.join(unknown)}", where=where, fix=fix)
    read = {name: _decode_value(hints[name], value[name], f"{where}.{name}") for name in value}
    try:
        return kind(**read)
    except TypeError as error:
        raise Refused(f"{where}: {error}", where=where, fix="Add the missing fields") from error
