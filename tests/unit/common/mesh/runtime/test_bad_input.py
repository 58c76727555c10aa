"""Malformed messages to a live actor: answered or counted, without disturbing it."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from meshrl.common.base.encoding.messages import encode
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.transport.address import parse_endpoint
from meshrl.common.mesh.wire.frames import (
    CALL,
    CANCEL,
    CREDIT,
    END,
    ERROR,
    ITEM,
    PROBE,
    REPLY,
    pack_header,
    unpack_error,
    unpack_header,
)
from tests.meshes import encode_first_frame, make_curve_socket, make_keys
from tests.unit.common.mesh.runtime.talking import Join, Number, Talk, Talker, Text, until

MALFORMED = 1000
small = st.integers(-3, 300) | st.integers(-(2**63), 2**64 - 1)
word = st.sampled_from(["", "a", "echo", "numbers", "tell", "sleep"]) | st.text(max_size=8)
field = small | word | st.binary(max_size=8) | st.none() | st.floats() | st.lists(small, max_size=3)


def headers(incarnation: str) -> st.SearchStrategy[bytes]:
    """Generate headers, from noise to headers that are valid in all but one field."""
    target = st.sampled_from([incarnation, "", "other"])
    kind = st.integers(0, 12)
    header_fields = st.tuples(
        st.just(1) | small, kind, small, word, word, word, target, small, st.text(max_size=60)
    )
    return (
        st.binary(max_size=80)
        | header_fields.map(_packed)
        | st.lists(field, max_size=12).map(_packed)
        | st.just(b"h" * 5000)
    )


def _packed(value: Any) -> bytes:
    try:
        return bytes(msgpack.packb(value))
    except (ValueError, OverflowError):
        return b"\xc1"


bodies = st.binary(max_size=60) | field.map(_packed) | st.lists(field, max_size=4).map(_packed)


def malformed(incarnation: str) -> list[list[bytes]]:
    """Generate the same thousand messages each time."""
    messages: list[list[bytes]] = []

    @settings(
        max_examples=MALFORMED,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(headers(incarnation), st.lists(bodies, max_size=4))
    def collect(header: bytes, rest: list[bytes]) -> None:
        messages.append([header, *rest])

    collect()
    return messages


class RawPeer:
    """Raw socket that can violate the protocol."""

    def __init__(self, mesh: Mesh) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        make_curve_socket(self._socket, make_keys("test"), mesh.transport.address)
        self._socket.connect(parse_endpoint(mesh.transport.address))

    def send(self, frames: list[bytes]) -> None:
        self._socket.send_multipart([encode_first_frame(frames[0]), *frames[1:]])

    def send_raw(self, frames: list[bytes]) -> None:
        self._socket.send_multipart(frames)

    async def answer(self, within_s: float = 20.0) -> list[bytes]:
        await until(lambda: self._socket.poll(0), within_s)
        first, *rest = self._socket.recv_multipart()
        ends = 2 + int.from_bytes(first[:2], "little")
        return [first[2:ends], first[ends:], *rest]

    async def reason(self) -> str:
        header, body = await self.answer()
        assert unpack_header(header)[1] == ERROR
        return unpack_error(body)[0]

    def close(self) -> None:
        self._context.destroy(0)


def _echo(mesh: Mesh, call_id: int = 1, method: str = "echo", target: str | None = None) -> bytes:
    incarnation = mesh.incarnation if target is None else target
    return pack_header(CALL, call_id, mesh.name, method, "stranger", incarnation, 60_000)


@pytest.mark.rotating(2)
async def test_malformed_messages_do_not_disturb_the_actor(join: Join) -> None:
    mesh = await join("a", Talker())
    client = (await join("b")).ref("a")
    messages = malformed(mesh.incarnation)
    assert len(messages) >= MALFORMED
    peer = RawPeer(mesh)
    for frames in messages:
        peer.send(frames)
        if len(frames[0]) % 50 == 0:
            assert await client.call(Talk.echo, Text("between")) == Text("between")
    body = encode(Text("after"))[0]
    peer.send([_echo(mesh, call_id=10**9), body])
    while True:  # replies to the valid messages arrive first
        header, *rest = await peer.answer()
        if unpack_header(header)[2] == 10**9:
            assert rest == [body]
            break
    peer.close()
    assert await client.call(Talk.echo, Text("after")) == Text("after")
    assert mesh.telemetry.counters["bad_frames"] > MALFORMED / 10


async def test_messages_without_a_header_are_counted(join: Join) -> None:
    mesh = await join("a", Talker())
    peer = RawPeer(mesh)
    for frames in ([b""], [b"x"], [b"\xff\xff"], [b"\xff\xffabc", b"d"], [b"\0\0"], [b"", b""]):
        peer.send_raw(frames)
    peer.send([_echo(mesh, 2), encode(Text("x"))[0]])
    assert unpack_header((await peer.answer())[0])[2] == 2
    assert mesh.telemetry.counters["bad_frames"] == 6
    peer.close()


async def test_wrong_incarnation_is_rejected_at_once(join: Join) -> None:
    mesh = await join("a", Talker())
    peer = RawPeer(mesh)
    peer.send([_echo(mesh, target="an earlier start"), encode(Text(""))[0]])
    assert await peer.reason() == "stale_incarnation"
    peer.close()


async def test_unknown_method_and_wrong_actor_are_rejected(join: Join) -> None:
    mesh = await join("a", Talker())
    peer = RawPeer(mesh)
    peer.send([_echo(mesh, method="nonsense"), b"\xc0"])
    assert await peer.reason() == "unknown_method"
    peer.send([pack_header(CALL, 2, "z", "echo", "s", mesh.incarnation), b"\xc0"])
    assert await peer.reason() == "not_found"
    peer.close()


async def test_oversized_and_surplus_buffers_are_rejected(join: Join) -> None:
    mesh = await join("a", Talker())
    peer = RawPeer(mesh)
    peer.send([_echo(mesh, 1), b"\xc4" * (17 << 20)])
    assert await peer.reason() == "bad_message"
    peer.send([_echo(mesh, 2), encode(Text(""))[0], *[b""] * 1100])
    assert await peer.reason() == "bad_message"
    peer.send([_echo(mesh, 3), encode(Text(""))[0], b"surplus"])
    assert await peer.reason() == "bad_message"
    peer.close()


async def test_unrequested_answers_are_ignored(join: Join) -> None:
    mesh = await join("a", Talker())
    peer = RawPeer(mesh)
    for kind in (REPLY, ERROR, ITEM, END, CREDIT, CANCEL, 99):
        peer.send([pack_header(kind, 1, "a", "", "s", mesh.incarnation), b"\xc0"])
    peer.send([_echo(mesh, 2), encode(Text("x"))[0]])
    assert len(await peer.answer()) == 2
    peer.close()


async def test_probe_is_returned_unless_its_call_runs_or_waits(join: Join) -> None:
    actor = Talker()
    mesh = await join("a", actor)
    peer = RawPeer(mesh)
    peer.send([_echo(mesh, 1, "sleep"), encode(Number(30))[0]])
    mesh._server._is_open = False  # as while its actor starts
    peer.send([_echo(mesh, 2), encode(Text(""))[0]])
    for call_id in (1, 2, 3):
        peer.send([pack_header(PROBE, call_id, "a", "", "s", mesh.incarnation), b"\xc0"])
    assert unpack_header((await peer.answer())[0])[1:3] == (PROBE, 3)
    mesh._server.open()
    assert unpack_header((await peer.answer())[0])[1:3] == (REPLY, 2)
    peer.close()


async def test_repeated_request_runs_once(join: Join) -> None:
    actor = Talker()
    mesh = await join("a", actor)
    peer = RawPeer(mesh)
    for call_id in (5, 5, 7, 6, 7, 5):
        peer.send([_echo(mesh, call_id, "count"), encode(Number(call_id))[0]])
    peer.send([_echo(mesh, 8, "echo"), encode(Text(""))[0]])
    while unpack_header((await peer.answer())[0])[2] != 8:
        pass
    assert actor.counted == [5, 7, 6]
    peer.close()


async def test_call_cancelled_before_it_starts_leaves_nothing_running(join: Join) -> None:
    actor = Talker()
    mesh = await join("a", actor)
    peer = RawPeer(mesh)
    for call_id in range(1, 200):
        peer.send([_echo(mesh, call_id, "sleep"), encode(Number(30))[0]])
        peer.send([pack_header(CANCEL, call_id, "a", "", "stranger", mesh.incarnation), b"\xc0"])
    peer.send([_echo(mesh, 500), encode(Text(""))[0]])
    await peer.answer()
    await until(lambda: mesh.running_calls == 0)
    assert actor.sleeping == 0
    peer.close()
