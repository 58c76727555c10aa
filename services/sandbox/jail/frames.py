"""Length-prefixed JSON between a jail and the sandbox, over blocking descriptors."""

from __future__ import annotations

import json
import os
from typing import Any, Callable

LENGTH = 4  # bytes of the prefix, little-endian
LIMIT = 16 << 20  # bytes of a frame; a longer prefix means that the stream is garbage


class Closed(Exception):
    """The other end has closed, or speaks garbage."""


def pack(value: Any) -> bytes:
    body = json.dumps(value).encode()
    return len(body).to_bytes(LENGTH, "little") + body


def send(fd: int, value: Any) -> None:
    record = memoryview(pack(value))
    try:
        while record:
            record = record[os.write(fd, record) :]
    except OSError as error:
        raise Closed(str(error)) from None


def receive(fd: int, wait: Callable[[], None] | None = None) -> Any:
    """The next frame; Closed at the end. Reads not a byte more than that. `wait` is called before
    each part is read.
    """
    length = int.from_bytes(_exactly(fd, LENGTH, wait), "little")
    if length > LIMIT:
        raise Closed(f"a frame of {length} bytes")
    try:
        return json.loads(_exactly(fd, length, wait))
    except (ValueError, RecursionError, MemoryError) as error:
        raise Closed(f"not JSON: {type(error).__name__}") from None


def _exactly(fd: int, size: int, wait: Callable[[], None] | None) -> bytes:
    parts = []
    while size:
        if wait is not None:
            wait()
        try:
            part = os.read(fd, min(size, 1 << 16))
        except OSError as error:
            raise Closed(str(error)) from None
        if not part:
            raise Closed("the end of the stream")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
