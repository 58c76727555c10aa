"""The files of a run as bytes: events, ledger segments, checkpoints."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

IDS_APART = 1_000_000_000  # of the groups of two lineages, between which Redis was lost
_HEADERS = {2: 8, 3: 12}  # bytes of a segment's header, by format
_FRAME = struct.Struct("<IIB")  # payload bytes, CRC-32 of kind and payload, kind
_TOKENS = struct.Struct("<6BH3Iq")  # format, five widths, experts, rows, tokens, runs, first group
_OPEN, _TOKEN_ROWS, _CLOSE = 1, 2, 7  # kinds of records; of the others the first word tells


@dataclass
class Files:
    job: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    ledger: set[int] = field(default_factory=set)  # groups that it tells of
    mark: dict[str, Any] = field(default_factory=dict)  # what was in flight at a clean end
    problems: list[str] = field(default_factory=list)


def read(run: Path) -> Files:
    """All of a run's; what does not read is a problem. FileNotFoundError when there is no run."""
    found = Files(job=str(json.loads((run / "job.json").read_bytes())["job"]))
    found.events = list(_events(run / "events.jsonl", found.problems))
    for path in sorted((run / "checkpoints").glob("step-*.json")):
        try:
            found.checkpoints.append(json.loads(path.read_bytes()))
        except ValueError:
            found.problems.append(f"{path.name} is not JSON")
    for path in sorted((run / "ledger").rglob("*.ledger")):
        found.ledger |= _groups(path, found.problems)
    if (run / "in_flight.json").is_file():
        found.mark = json.loads((run / "in_flight.json").read_bytes())
    return found


def _events(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Lines; what follows the last newline is torn."""
    last = (0, 0)
    content = path.read_bytes() if path.is_file() else b""
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            event = json.loads(line)
            ms, _, count = event["id"].partition("-")
            here = int(ms), int(count)
            event["fields"]["job"] = event["fields"].get("job", "")
        except (ValueError, KeyError, TypeError) as error:
            problems.append(f"{path.name}, line {number} does not read: {error!r}")
            continue
        if here <= last:
            problems.append(f"{path.name}, line {number}: event {event['id']} does not follow")
        last = here
        yield event


def _groups(path: Path, problems: list[str]) -> set[int]:
    """Groups that the whole records of a segment mention."""
    content, found = path.read_bytes(), set[int]()
    if not content:
        return found
    at = _HEADERS.get(content[7], 0) if content.startswith(b"MRLEDGR") and len(content) > 7 else 0
    if not at:
        problems.append(f"{path.name} is no segment that is known")
        return found
    while at + _FRAME.size <= len(content):
        length, crc, kind = _FRAME.unpack_from(content, at)
        payload = content[at + _FRAME.size : at + _FRAME.size + length]
        if len(payload) < length or zlib.crc32(payload, kind) != crc:
            break  # torn
        at += _FRAME.size + length
        found |= _mentioned(kind, payload)
    return found


def _mentioned(kind: int, payload: bytes) -> set[int]:
    if kind & 0x80:
        kind, payload = kind & 0x7F, zlib.decompress(payload, -12)
    if kind == _TOKEN_ROWS:
        _, width, _, _, _, _, _, rows, _, _, first = _TOKENS.unpack_from(payload)
        column = payload[_TOKENS.size : _TOKENS.size + rows * width]
        words = (column[i : i + width] for i in range(0, len(column), width or 1))
        return {first + int.from_bytes(word, "little") for word in words} or {first}
    number = int(msgpack.unpackb(payload, strict_map_key=False)[0])
    return {number if kind in (_OPEN, _CLOSE) else number >> 12}
