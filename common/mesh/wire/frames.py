"""Frames of a message on the wire, [header][body][buffer...]: their kinds and size limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from meshrl.common.base.encoding.messages import (
    DECODE_ERRORS,
    LIMITS,
    Frame,
    check_arity,
    unpack_body,
)
from meshrl.common.base.errors import BadMessage

WIRE_VERSION = 1
CALL, REPLY, ERROR, ITEM, END, CREDIT, CANCEL, CAST, PROBE = range(1, 10)
# version, kind, id, actor, method, sender, target, number, traceparent. `sender` and `target` are
# incarnations. `number` is the remaining deadline of a CALL in ms (0: none), the position of an
# ITEM or END in its stream, and in a CREDIT the number of items that the consumer has taken.
# A caller sends a PROBE of a long call; the callee returns it if it does not run that call.
_HEADER_TYPES = (int, int, int, str, str, str, str, int, str)
_pack: Callable[[Any], bytes] = msgpack.Packer(autoreset=True).pack
_unpack: Callable[..., Any] = msgpack.unpackb


def pack_header(
    kind: int,
    call_id: int,
    actor: str = "",
    method: str = "",
    sender: str = "",
    target: str = "",
    number: int = 0,
    trace: str = "",
) -> bytes:
    """Pack the header frame of a message.

    The meaning of `number` depends on the kind: a deadline, a position or credits.
    """
    return _pack((WIRE_VERSION, kind, call_id, actor, method, sender, target, number, trace))


def unpack_header(frame: Frame) -> tuple[Any, ...]:
    """Unpack the nine fields of a header; raise BadMessage if it is too long or malformed."""
    if len(frame) > LIMITS.header_bytes:
        raise BadMessage(f"a header has {len(frame)} bytes; the limit is {LIMITS.header_bytes}")
    try:
        fields = tuple(_unpack(frame))
    except DECODE_ERRORS as error:
        raise BadMessage(f"a header is not MessagePack: {error}") from None
    if tuple(map(type, fields)) != _HEADER_TYPES:
        raise BadMessage("a header does not have the nine required fields")
    if fields[0] != WIRE_VERSION:
        raise BadMessage(
            f"a message has wire version {fields[0]}; this process uses version {WIRE_VERSION}",
            fix="Start all processes of a mesh from one installation",
        )
    return fields


def pack_error(code: str, text: str) -> bytes:
    """Pack the body of an error: its code, and up to 4096 characters of text."""
    return _pack((code, text[:4096]))


def unpack_error(body: Frame) -> tuple[str, str]:
    """Unpack an error's body to (code, text); raise BadMessage if it is malformed."""
    code, text = check_arity(unpack_body(body), 2, "an error")
    if type(code) is not str or type(text) is not str:
        raise BadMessage("an error is not a code and a text")
    return code, text


def check_sizes(frames: Sequence[Frame]) -> None:
    """Raise BadMessage if the frames [header, body, buffer...] exceed a limit; check lengths
    only.
    """
    if len(frames) > LIMITS.frames:
        raise BadMessage(f"a message has {len(frames)} frames; the limit is {LIMITS.frames}")
    total = 0
    for place, frame in enumerate(frames):
        size = len(frame)
        total += size
        limit = LIMITS.body_bytes if place == 1 else LIMITS.buffer_bytes
        if size > limit:
            part = "body" if place == 1 else f"buffer {place - 2}"
            raise BadMessage(
                f"a {part} has {size} bytes; the limit is {limit}",
                fix="Send it in parts, or through the bulk port",
            )
    if total > LIMITS.total_bytes:
        raise BadMessage(f"a message has {total} bytes; the limit is {LIMITS.total_bytes}")
