"""Messages and errors on the wire."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.base.encoding.messages import LIMITS, Array, decode, encode, message
from meshrl.common.base.errors import BadMessage, DeadlineExceeded, MeshError, from_wire, to_wire
from meshrl.common.mesh.wire.frames import check_sizes, pack_header, unpack_header

ROOT = Path(__file__).parents[5]
_CLASS = re.compile(r"^class (\w+)\(([\w., ]+)\)", re.MULTILINE)


@message
class Inner:
    name: str
    weight: float


@message
class Everything:
    integer: int
    real: float
    text: str
    raw: bytes
    flag: bool
    maybe: int | None
    integers: list[int]
    pairs: list[tuple[int, str]]
    table: dict[str, Inner]
    fixed: tuple[str, ...]
    inner: Inner
    inners: list[Inner]
    maybe_inner: Inner | None
    anything: Any
    later: str = "default"


@message
class Blocks:
    first: Array
    second: Array | None
    rest: list[Array]


integers = st.integers(-(2**63), 2**64 - 1)


reals = st.floats(allow_nan=False)


inner = st.builds(Inner, st.text(), reals)


plain = st.recursive(
    st.none() | st.booleans() | integers | reals | st.text() | st.binary(),
    lambda deeper: st.lists(deeper, max_size=3) | st.dictionaries(st.text(), deeper, max_size=3),
    max_leaves=8,
)


everything = st.builds(
    Everything,
    integers,
    reals,
    st.text(),
    st.binary(),
    st.booleans(),
    st.none() | integers,
    st.lists(integers),
    st.lists(st.tuples(integers, st.text())),
    st.dictionaries(st.text(), inner),
    st.lists(st.text()).map(tuple),
    inner,
    st.lists(inner),
    st.none() | inner,
    plain,
    st.text(),
)


@settings(max_examples=50)
@given(everything)
def test_message_round_trips_unchanged(m: Everything) -> None:
    assert decode(Everything, *encode(m)) == m


@given(st.binary(max_size=200), st.lists(st.binary(max_size=20), max_size=3))
def test_random_bytes_decode_or_raise_bad_message(body: bytes, buffers: list[bytes]) -> None:
    for cls in (Everything, Blocks, Inner):
        with suppress(BadMessage):
            assert isinstance(decode(cls, body, buffers), cls)


@given(plain, plain, plain)
def test_values_of_other_types_raise_bad_message(a: Any, b: Any, c: Any) -> None:
    try:
        m = decode(Blocks, msgpack.packb([a, b, c]))
    except BadMessage:
        return
    assert isinstance(m.first, np.ndarray)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int32", "int64", "uint16", "float32", "float64"]
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (40, 50), (2, 0, 4)])
def test_array_keeps_its_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    m = decode(Blocks, *encode(Blocks(array, None, [array.T, array])))
    for received, sent in ((m.first, array), (m.rest[0], array.T), (m.rest[1], array)):
        assert received.dtype == sent.dtype and received.shape == sent.shape
        assert np.array_equal(received, sent)


def test_large_arrays_are_encoded_without_a_copy() -> None:
    array = np.zeros(4096, np.float32)
    body, buffers = encode(Blocks(array, None, [np.zeros(3)]))
    assert len(body) < 100 and len(buffers) == 1
    assert np.shares_memory(np.frombuffer(buffers[0], np.float32), array)


def test_buffers_must_match_the_body() -> None:
    body, buffers = encode(Blocks(np.zeros(4096), None, []))
    invalid_buffers: list[list[Any]] = [[], [bytes(8)], [*buffers, bytes(4)]]
    for wrong in invalid_buffers:
        with pytest.raises(BadMessage):
            decode(Blocks, body, wrong)


def test_missing_or_additional_field_raises_bad_message() -> None:
    fields: Any
    for fields in (["a"], ["a", 1.0, 2], [], {}):
        with pytest.raises(BadMessage):
            decode(Inner, msgpack.packb(fields))


@pytest.mark.parametrize("fields", [["a", "1"], [b"a", 1.0], ["a", True], [1, 1.0], ["a", None]])
def test_field_of_the_wrong_type_is_named(fields: list[Any]) -> None:
    with pytest.raises(BadMessage, match=r"Inner\.(name|weight)"):
        decode(Inner, msgpack.packb(fields))


def test_nesting_beyond_the_limit_is_rejected() -> None:
    @message
    class Holder:
        value: Any

    value: Any = 1
    for _ in range(LIMITS.depth + 1):
        value = [value]
    with pytest.raises(BadMessage, match="nested"):
        decode(Holder, *encode(Holder(value)))
    with pytest.raises(BadMessage):
        decode(Holder, b"\x91" * 5000 + b"\xc0")


def test_object_arrays_and_foreign_values_are_rejected() -> None:
    with pytest.raises(BadMessage):
        encode(Blocks(np.array([{}]), None, []))
    with pytest.raises(BadMessage):
        encode(Inner(object(), 1.0))  # type: ignore[arg-type]


def test_size_checks_read_only_lengths() -> None:
    limit = LIMITS
    for frames in (
        [b""] * (limit.frames + 1),
        [b"", memoryview(bytes(1)).cast("B"), _LengthOnly(limit.buffer_bytes + 1)],
        [b"", _LengthOnly(limit.body_bytes + 1)],
        [b"", b"", *[_LengthOnly(limit.buffer_bytes)] * 5],
    ):
        with pytest.raises(BadMessage):
            check_sizes(frames)  # type: ignore[arg-type]


class _LengthOnly:
    """Object with a length and no bytes: reading it fails the test."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


def test_headers_of_other_versions_and_shapes_are_rejected() -> None:
    good = pack_header(1, 7, "weights", "stage", "a", "b", 10, "trace")
    assert unpack_header(good)[1:] == (1, 7, "weights", "stage", "a", "b", 10, "trace")
    for bad in (
        msgpack.packb((2, *unpack_header(good)[1:])),
        msgpack.packb([1, 1]),
        msgpack.packb([True, 1, 7, "", "", "", "", 0, ""]),
        msgpack.packb((*unpack_header(good)[:8], "t" * 3000)),
        good[:-1],
        b"",
    ):
        with pytest.raises(BadMessage):
            unpack_header(bad)


def test_unsupported_field_type_is_rejected_at_class_creation() -> None:
    with pytest.raises(TypeError, match=r"Wrong\.value"):

        @message
        class Wrong:
            value: set[int]


def list_error_classes() -> list[type[MeshError]]:
    """Return every class below MeshError, found in the source text, including classes of modules
    that no other test imports.
    """
    classes: list[tuple[str, str, set[str]]] = []
    for package in ("common", "services", "meshrl", "sim"):
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            module = f"meshrl.{module.removeprefix('meshrl.')}"
            for name, bases in _CLASS.findall(path.read_text()):
                classes.append(
                    (module, name, {b.strip().rpartition(".")[2] for b in bases.split(",")})
                )
    known, size = {"MeshError"}, 0
    while len(known) > size:
        size = len(known)
        known |= {name for _, name, bases in classes if bases & known}
    error_names = [(module, name) for module, name, bases in classes if bases & known]
    optional = (
        []
        if find_spec("verifiers")
        else ["meshrl.services.environment.verifiers_environment.episode"]
    )
    return [getattr(import_module(m), name) for m, name in error_names if m not in optional]


def test_each_error_round_trips_as_its_class() -> None:
    error_classes = list_error_classes()
    assert len(error_classes) > 25
    for cls in error_classes:
        error = cls("it went wrong", where="there")
        arrived = from_wire(*to_wire(error), where="a")
        assert type(arrived) is cls and "it went wrong" in str(arrived)


def test_error_codes_are_unique() -> None:
    with pytest.raises(TypeError, match="needs its own code"):

        class Later(DeadlineExceeded):
            pass

    assert type(from_wire(DeadlineExceeded.code, "late")) is DeadlineExceeded
