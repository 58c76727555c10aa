"""Frames of messages between a shard and its environment processes, packed one by one.

A value that cannot be encoded (an integer past 64 bits, half a surrogate pair) so fails its own
message, not the whole frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgpack

from meshrl.common.base.errors import BadMessage
from meshrl.common.mesh.process.entry.child import MAX_FRAME_BYTES

HEADER_BYTES = 5  # maximum of bytes before the messages of a frame
ENVELOPE_BYTES = 64  # maximum of bytes around an answer, in its message


def pack_message(message: Any) -> bytes:
    """Pack a message to bytes; raise BadMessage if it cannot be encoded."""
    try:
        content: bytes = msgpack.packb(message, use_bin_type=True)
    except (OverflowError, TypeError, ValueError) as error:
        raise BadMessage(f"{type(error).__name__}: {error}") from error
    if HEADER_BYTES + len(content) > MAX_FRAME_BYTES:
        raise BadMessage(
            f"the message has {len(content)} bytes; the limit is {MAX_FRAME_BYTES - HEADER_BYTES}"
        )
    return content


def check_packable(answer: Any) -> None:
    """Raise BadMessage if the answer cannot be encoded in its message."""
    pack_message([answer, bytes(ENVELOPE_BYTES)])


def build_frames(messages: Iterable[bytes]) -> Iterator[bytes]:
    """Combine packed messages into lists, in as few frames as they fit in."""
    batch: list[bytes] = []
    size = HEADER_BYTES
    for message in messages:
        if batch and size + len(message) > MAX_FRAME_BYTES:
            yield _build_frame(batch)
            batch, size = [], HEADER_BYTES
        batch.append(message)
        size += len(message)
    if batch:
        yield _build_frame(batch)


def _build_frame(messages: list[bytes]) -> bytes:
    header: bytes = msgpack.Packer().pack_array_header(len(messages))
    return header + b"".join(messages)


def replace_surrogates(text: str) -> str:
    """Return the text with halves of surrogate pairs replaced by question marks."""
    return text.encode("utf-8", "replace").decode()
