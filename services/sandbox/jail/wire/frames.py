"""Length-prefixed JSON between a jail and the sandbox, over blocking descriptors."""

from __future__ import annotations

import json
import os
from typing import Any, Callable

LENGTH = 4  # bytes of the prefix, little-endian
MAX_FRAME_BYTES = 16 << 20  # bytes of a frame; a longer prefix means that the stream is invalid


# Without the functions of `json` around it: a fork copies the pages that it touches.
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


class FrameChannelClosed(Exception):
    """Error raised when the other end has closed, or sends invalid data."""


def pack(value: Any) -> bytes:
    body = json.dumps(value).encode()
    return len(body).to_bytes(LENGTH, "little") + body


def send(fd: int, value: Any) -> None:
    record = memoryview(pack(value))
    try:
        while record:
            record = record[os.write(fd, record) :]
    except OSError as error:
        raise FrameChannelClosed(str(error)) from None


def receive(fd: int, before_read: Callable[[], None] | None = None) -> Any:
    """Return the next frame; FrameChannelClosed at the end.

    Reads no byte beyond the frame. `before_read` is called before each part is read.
    """
    length = int.from_bytes(_read_exactly(fd, LENGTH, before_read), "little")
    if length > MAX_FRAME_BYTES:
        raise FrameChannelClosed(f"a frame of {length} bytes exceeds the limit")
    try:
        return parse(_read_exactly(fd, length, before_read))
    except (ValueError, StopIteration, RecursionError, MemoryError) as error:
        raise FrameChannelClosed(f"not JSON: {type(error).__name__}") from None


def take_frame(buffer: bytearray, limit_bytes: int) -> dict[str, Any] | None:
    """Remove the next frame from the buffer and return it; None if it is incomplete.

    FrameChannelClosed when it is longer than `limit_bytes`, or no object.
    """
    length = int.from_bytes(buffer[:LENGTH], "little")
    if len(buffer) >= LENGTH and length > limit_bytes:
        raise FrameChannelClosed(f"a frame of {length} bytes exceeds the limit")
    if len(buffer) < LENGTH + length:
        return None
    body = bytes(buffer[LENGTH : LENGTH + length])
    del buffer[: LENGTH + length]
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameChannelClosed(f"a frame is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FrameChannelClosed("a frame is not a JSON object")
    return value


def parse(body: bytes) -> Any:
    """Parse JSON without spaces around it; ValueError, StopIteration."""
    text = body.decode()
    value, end = _scan(text, 0)
    if end != len(text):
        raise ValueError("data follows the value")
    return value


def read_available(fd: int, size: int) -> bytes | None:
    """Read at most `size` available bytes; empty at the end, None: none are available yet."""
    try:
        return os.read(fd, size)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _read_exactly(fd: int, size: int, before_read: Callable[[], None] | None) -> bytes:
    parts: list[bytes] = []
    while size:
        if before_read is not None:
            before_read()
        try:
            part = os.read(fd, min(size, 1 << 16))
        except OSError as error:
            raise FrameChannelClosed(str(error)) from None
        if not part:
            raise FrameChannelClosed("the stream has ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
