"""Encoding of a typed message as one byte string, the form of finished groups and manifests in the
store.
"""

from __future__ import annotations

import struct
from typing import Any, TypeVar

from meshrl.common.base.encoding.messages import decode, encode
from meshrl.common.base.errors import BadMessage

T = TypeVar("T")
_COUNT = struct.Struct("<I")


def pack(message: Any) -> bytes:
    """Encode `message` (a @message dataclass) with its buffers as bytes."""
    body, buffers = encode(message)
    parts: list[bytes | memoryview] = [body, *buffers]
    head = _COUNT.pack(len(parts)) + b"".join(
        _COUNT.pack(len(memoryview(p).cast("B"))) for p in parts
    )
    return head + b"".join(bytes(p) for p in parts)


def unpack(cls: type[T], content: bytes | memoryview) -> T:
    """Decode bytes of `pack`; raise BadMessage if they are no `cls`."""
    view = memoryview(content)
    try:
        (count,) = _COUNT.unpack_from(view, 0)
        sizes = [
            _COUNT.unpack_from(view, _COUNT.size * (1 + i))[0] for i in range(min(count, 4096))
        ]
    except struct.error as error:
        raise BadMessage(f"a stored {cls.__name__} is truncated: {error}") from error
    offset = _COUNT.size * (1 + count)
    if count < 1 or offset + sum(sizes) != len(view):
        raise BadMessage(
            f"a stored {cls.__name__} has {len(view)} bytes, but its header gives another size"
        )
    parts = []
    for size in sizes:
        parts.append(view[offset : offset + size])
        offset += size
    return decode(cls, bytes(parts[0]), parts[1:])
