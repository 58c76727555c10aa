"""Whatever arrives at a bulk port, its thread goes on and nothing is left behind."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshrl.common.base.errors import MeshError
from meshrl.common.weights.bulk.channel import FRAME_BYTES
from meshrl.common.weights.bulk.server import STRANGERS
from meshrl.common.weights.bulk.serving import Serving
from meshrl.common.weights.bulk.session import ANSWER, GET, HAS, PUT, REQUEST, REST, WHERE
from meshrl.common.weights.chunks.verified import NAME
from meshrl.common.weights.handshakes.handshake import SUITES
from tests.unit.common.weights.bulk.knocking import CONTENT, Port, all_of

SLOW = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
NUMBERS = st.sampled_from([0, 1, 2, len(CONTENT), 1 << 20, 1 << 32, 1 << 62, (1 << 64) - 1]) | (
    st.integers(0, (1 << 64) - 1)
)
FIRST = st.binary(max_size=300) | st.builds(
    bytes.__add__, st.sampled_from(list(SUITES)), st.binary(max_size=200)
)
LENGTHS = st.integers(0, (1 << 32) - 1) | st.integers(FRAME_BYTES, FRAME_BYTES + 40)


@pytest.fixture(params=[True, False], ids=["sealed", "plain"])
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Port]:
    made = Port(tmp_path / "chunks", sealed=request.param)
    yield made
    made.server.close()


def goes_on(port: Port, capfd: pytest.CaptureFixture[str]) -> None:
    with port.session(port.door("trainer", sealed=False)) as session:
        assert session.chunk(port.digest) == CONTENT
    assert "Traceback" not in capfd.readouterr().err


@SLOW
@given(first=FIRST)
def test_bytes_without_a_proof_are_not_answered(
    port: Port, capfd: pytest.CaptureFixture[str], first: bytes
) -> None:
    with port.connect() as connection:
        with suppress(OSError):  # it has hung up already
            connection.sendall(first)
            connection.shutdown(socket.SHUT_WR)
        assert all_of(connection) == b""
    goes_on(port, capfd)


@SLOW
@given(
    verb=st.sampled_from([GET, PUT, HAS, REST, WHERE]) | st.binary(min_size=1, max_size=1),
    digest=st.just(b"") | st.binary(min_size=32, max_size=32),
    space=st.integers(0, 255),
    numbers=st.tuples(NUMBERS, NUMBERS, NUMBERS),
    behind=st.binary(max_size=2000),
)
def test_requests_that_make_no_sense_end_their_connection_at_most(
    port: Port,
    capfd: pytest.CaptureFixture[str],
    verb: bytes,
    digest: bytes,
    space: int,
    numbers: tuple[int, int, int],
    behind: bytes,
) -> None:
    with port.session(port.door("trainer", sealed=False)) as session:
        head = REQUEST.pack(verb, space, digest or bytes.fromhex(port.digest), *numbers)
        with suppress(OSError, MeshError):
            session._send(head)
            session._send(behind)
            session._socket.shutdown(socket.SHUT_WR)
            session._whole(ANSWER.size)
    goes_on(port, capfd)


@SLOW
@given(length=LENGTHS, sealed=st.binary(max_size=600))
def test_frames_that_nobody_sealed_end_their_connection(
    port: Port, capfd: pytest.CaptureFixture[str], length: int, sealed: bytes
) -> None:
    with port.session(port.door("trainer", sealed=True)) as session, suppress(OSError):
        session._socket.setblocking(True)
        session._socket.sendall(length.to_bytes(4, "little") + sealed)
        session._socket.shutdown(socket.SHUT_WR)
        assert all_of(session._socket) == b""
    goes_on(port, capfd)


@pytest.mark.deep
def test_a_flood_leaves_nothing(port: Port, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither what served it nor scratch files."""
    hello = port.door("", sealed=True).asking(port.address, port.place).hello()
    for _ in range(100):
        for content in (b"", os.urandom(101), next(iter(SUITES)) + os.urandom(97), hello):
            with port.connect() as connection, suppress(OSError):
                connection.sendall(content)
    goes_on(port, capfd)
    gc.collect()
    every = [one for one in gc.get_objects() if isinstance(one, Serving)]
    served = [one for one in every if one._chunks is port.chunks]
    assert len(served) <= STRANGERS + 2 and port.server.connections <= STRANGERS + 1
    assert [path.name for path in port.chunks.directory.rglob(".*")] == [NAME]
