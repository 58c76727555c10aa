"""Typed messages as MessagePack, with arrays as separate buffers. Import them from
`meshrl.common.mesh.wire.frames`.

A message is a frozen dataclass; its encoder and decoder are compiled once, when the class is
created. The body is a MessagePack array of the fields in order. Arrays of 1 KiB and more are sent
as separate frames, without a copy. Received bytes are not trusted: sizes are checked before
decoding, types during it, and each violation is a BadMessage.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import (
    Any,
    NoReturn,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import msgpack
import numpy as np

from meshrl.common.base.errors import BadMessage

M = TypeVar("M")
Array = np.ndarray[Any, np.dtype[Any]]
Frame = bytes | memoryview

OUT_OF_BAND_BYTES = 1024  # below this size a separate frame costs more than a copy
_DTYPES = {
    np.dtype(name).str: np.dtype(name)
    for name in (
        *("bool", "float16", "float32", "float64"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    )
}

_pack: Callable[[Any], bytes] = msgpack.Packer(autoreset=True).pack
DECODE_ERRORS = (ValueError, TypeError, OverflowError, msgpack.UnpackException)


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """Size limits of one message; checked before decoding, on both ends."""

    frames: int = 1026  # header, body and 1,024 buffers
    header_bytes: int = 2048
    body_bytes: int = 16 << 20
    buffer_bytes: int = 256 << 20
    total_bytes: int = 1 << 30
    items: int = 1 << 18  # entries of one list or map; longer ones belong in an Array
    depth: int = 32  # nesting inside an Any
    dims: int = 8


LIMITS = MessageLimits()


Buffers = list[memoryview]
_Encode = Callable[[Any, Buffers], Any]
_Decode = Callable[[Any, Iterator[Frame]], Any]


@dataclass(frozen=True, slots=True)
class _Codec:
    encode: _Encode
    decode: _Decode


_codecs: dict[type, _Codec] = {}


@dataclass_transform(frozen_default=True)
def message(cls: type[M]) -> type[M]:
    """Make `cls` a frozen, slotted dataclass that encode and decode understand.

    Fields: int, float, str, bytes, bool, X | None, list[X], dict[str, X], tuple[X, ...], tuple[X,
    Y], Any (MessagePack values), Array, and other messages. Types must be defined when the
    decorator runs.
    """
    message_type: Any = dataclass(frozen=True, slots=True)(cls)
    hints = get_type_hints(message_type, localns=sys._getframe(1).f_locals)
    _codecs[message_type] = _compile(
        message_type, {f.name: hints[f.name] for f in dataclasses.fields(message_type)}
    )
    kind: type[M] = message_type
    return kind


def encode(m: Any) -> tuple[bytes, Buffers]:
    """Encode a message to its body and out-of-band buffers.

    The buffers are views of the message's own arrays: do not write to these before they are sent.
    """
    buffers: Buffers = []
    codec = _codecs.get(type(m))
    if codec is None:
        raise BadMessage(f"{type(m).__name__} is not a message", fix="Decorate it with @message")
    try:
        return _pack(codec.encode(m, buffers)), buffers
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise BadMessage(f"MessagePack cannot encode a {type(m).__name__}: {error}") from None


def decode(cls: type[M], body: Frame, buffers: Sequence[Frame] = ()) -> M:
    """Decode the message in `body`; its arrays are read-only views of `buffers`."""
    rest = iter(buffers)
    decoded: M = _codecs[cls].decode(unpack_body(body), rest)
    if buffers and next(rest, None) is not None:
        raise BadMessage(f"a {cls.__name__} arrived with more buffers than arrays")
    return decoded


def unpack_body(body: Frame) -> Any:
    """Decode the MessagePack value of a body; raise BadMessage if it is malformed or exceeds a
    limit.
    """
    size = len(body)
    if size > LIMITS.body_bytes:
        raise BadMessage(f"a body has {size} bytes; the limit is {LIMITS.body_bytes}")
    try:
        if size <= LIMITS.items:  # msgpack bounds every container by the size of its input
            return msgpack.unpackb(body)
        return msgpack.unpackb(body, max_array_len=LIMITS.items, max_map_len=LIMITS.items)
    except DECODE_ERRORS as error:
        raise BadMessage(f"a body is not MessagePack within the limits: {error}") from None


def check_arity(value: Any, arity: int, what: str) -> list[Any]:
    """Return `value` as a list of `arity` fields; otherwise raise BadMessage that names `what`."""
    if type(value) is not list or len(value) != arity:
        raise BadMessage(f"{what} does not have its {arity} fields")
    return value


_SCALARS = {int: "int", str: "str", bytes: "bytes", bool: "bool"}


def _compile(cls: type, fields: dict[str, Any]) -> _Codec:
    """Compile a codec for one message class: scalars are checked inline, other fields by
    closures.
    """
    scope: dict[str, Any] = {
        "cls": cls,
        "fail": _fail,
        "as_float": _as_float,
        "checked": check_arity,
    }
    packed, checks = [], []
    for name, hint in fields.items():
        where = f"{cls.__name__}.{name}"
        scope[f"w_{name}"] = where
        codec = None if hint in _SCALARS or hint is float else _make_codec(hint, where)
        if codec is None or codec.encode is _pass_through:
            packed.append(f"m.{name}")
        else:
            scope[f"e_{name}"] = codec.encode
            packed.append(f"e_{name}(m.{name}, buffers)")
        if hint in _SCALARS:
            checks.append(f" if type(f_{name}) is not {_SCALARS[hint]}: fail(w_{name}, f_{name})")
        elif hint is float:
            checks.append(
                f" if type(f_{name}) is not float: f_{name} = as_float(w_{name}, f_{name})"
            )
        else:
            assert codec is not None
            scope[f"d_{name}"] = codec.decode
            checks.append(f" f_{name} = d_{name}(f_{name}, buffers)")
    names = "".join(f"f_{name}, " for name in fields)
    source = [
        "def encode(m, buffers):",
        f" return ({''.join(p + ', ' for p in packed)})",
        "def decode(v, buffers):",
        f" {names + '= ' if fields else ''}checked(v, {len(fields)}, {cls.__name__!r})",
        *checks,
        f" return cls({names})",
    ]
    exec("\n".join(source), scope)
    decode = scope["decode"]
    return _Codec(
        scope["encode"],
        _translate_value_errors(decode, cls) if hasattr(cls, "__post_init__") else decode,
    )


def _translate_value_errors(decode: _Decode, cls: type) -> _Decode:
    """Translate ValueError of a __post_init__ to BadMessage for received messages."""

    def guarded(v: Any, buffers: Iterator[Frame]) -> Any:
        try:
            return decode(v, buffers)
        except ValueError as error:
            raise BadMessage(f"{cls.__name__}: {error}") from None

    return guarded


def _fail(where: str, value: Any) -> NoReturn:
    raise BadMessage(f"{where} contains a {type(value).__name__}, which is not permitted there")


def _as_float(where: str, value: Any) -> float:
    if type(value) is not int:
        _fail(where, value)
    return float(value)


def _pass_through(value: Any, buffers: Buffers) -> Any:
    return value


# None encodes a message without content, and a plain value one with a single field.
_codecs[types.NoneType] = _Codec(
    _pass_through, lambda v, _: None if v is None else _fail("nothing", v)
)


def _make_codec(hint: Any, where: str) -> _Codec:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return _Codec(_pass_through, lambda v, _: _check_plain(v, where))
    if hint in _SCALARS or hint is float:
        return _Codec(_pass_through, _make_scalar_decoder(hint, where))
    if hint in _codecs:
        return _codecs[hint]
    if hint is np.ndarray or origin is np.ndarray:
        return _Codec(_encode_array, lambda v, buffers: _decode_array(v, buffers, where))
    if origin in (Union, types.UnionType) and len(args) == 2 and types.NoneType in args:
        return _make_optional_codec(
            _make_codec(args[0] if args[1] is types.NoneType else args[1], where)
        )
    if origin is list and len(args) == 1:
        return _make_list_codec(args[0], where, list)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _make_list_codec(args[0], where, tuple)
    if origin is tuple and args:
        return _make_tuple_codec([_make_codec(arg, where) for arg in args], where)
    if origin is dict and len(args) == 2 and args[0] is str:
        return _make_dict_codec(_make_codec(args[1], where), where)
    raise TypeError(
        f"{where}: a message cannot contain {hint!r}; see meshrl.common.base.encoding.messages"
    )


def _make_scalar_decoder(hint: type, where: str) -> _Decode:
    other = _as_float if hint is float else _fail
    return lambda v, _: v if type(v) is hint else other(where, v)


def _make_optional_codec(inner: _Codec) -> _Codec:
    return _Codec(
        _pass_through
        if inner.encode is _pass_through
        else lambda v, buffers: None if v is None else inner.encode(v, buffers),
        lambda v, buffers: None if v is None else inner.decode(v, buffers),
    )


def _make_list_codec(item: Any, where: str, kind: type) -> _Codec:
    inner = _make_codec(item, where)

    def decode_list(v: Any, buffers: Iterator[Frame]) -> Any:
        if type(v) is not list:
            _fail(where, v)
        if item in _SCALARS and set(map(type, v)) <= {item}:  # in C, for long lists of tokens
            return v if kind is list else tuple(v)
        return kind(inner.decode(x, buffers) for x in v)

    if inner.encode is _pass_through:
        return _Codec(_pass_through, decode_list)
    return _Codec(lambda v, buffers: [inner.encode(x, buffers) for x in v], decode_list)


def _make_tuple_codec(inner: list[_Codec], where: str) -> _Codec:
    def decode_tuple(v: Any, buffers: Iterator[Frame]) -> Any:
        parts = check_arity(v, len(inner), where)
        return tuple(codec.decode(x, buffers) for codec, x in zip(inner, parts, strict=True))

    return _Codec(
        lambda v, buffers: [c.encode(x, buffers) for c, x in zip(inner, v, strict=True)],
        decode_tuple,
    )


def _make_dict_codec(inner: _Codec, where: str) -> _Codec:
    def decode_dict(v: Any, buffers: Iterator[Frame]) -> Any:
        if type(v) is not dict or not set(map(type, v)) <= {str}:
            _fail(where, v)
        return {key: inner.decode(x, buffers) for key, x in v.items()}

    if inner.encode is _pass_through:
        return _Codec(_pass_through, decode_dict)
    return _Codec(
        lambda v, buffers: {k: inner.encode(x, buffers) for k, x in v.items()}, decode_dict
    )


_codecs |= {
    kind: _Codec(_pass_through, _make_scalar_decoder(kind, "a value"))
    for kind in (*_SCALARS, float)
}
_PLAIN_TYPES = {type(None), bool, int, float, str, bytes}


def _check_plain(value: Any, where: str) -> Any:
    """Return `value` if it is JSON-like (bytes allowed) and not nested deeper than the limit."""
    level, depth = [value], 0
    while level:
        deeper: list[Any] = []
        for entry in level:
            if type(entry) is list:
                deeper += entry
            elif type(entry) is dict:
                deeper += entry.values()
            elif type(entry) not in _PLAIN_TYPES:
                _fail(where, entry)
        level, depth = deeper, depth + 1
        if depth > LIMITS.depth:
            raise BadMessage(f"{where} is nested deeper than {LIMITS.depth}")
    return value


# ---------------------------------------------------------------- arrays


def _encode_array(array: Any, buffers: Buffers) -> Any:
    """Encode an array as [dtype, shape, bytes], with None for bytes that follow as the next
    buffer.
    """
    array = np.ascontiguousarray(array).reshape(np.shape(array))
    kind = array.dtype.str
    if kind not in _DTYPES:
        raise TypeError(f"an array of {array.dtype} cannot be sent")
    if array.nbytes < OUT_OF_BAND_BYTES:
        return kind, array.shape, array.tobytes()
    buffers.append(array.reshape(-1).view(np.uint8).data)
    return kind, array.shape, None


def _decode_array(value: Any, buffers: Iterator[Frame], where: str) -> Array:
    kind, shape, inline = check_arity(value, 3, where)
    dtype = _DTYPES.get(kind) if type(kind) is str else None
    if dtype is None:
        raise BadMessage(f"{where} is an array of unknown type {kind!r:.40}")
    fits = type(shape) is list and len(shape) <= LIMITS.dims
    if not fits or not all(type(n) is int and n >= 0 for n in shape):
        raise BadMessage(f"{where} is an array of invalid shape")
    raw = next(buffers, None) if inline is None else inline
    if type(raw) is not bytes and type(raw) is not memoryview:
        raise BadMessage(f"{where} is an array without its buffer")
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise BadMessage(f"{where} is an array of shape {shape} and {len(raw)} bytes of {kind}")
    return np.frombuffer(raw, dtype).reshape(shape)
