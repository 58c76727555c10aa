"""Calls of every method of every interface at every process, by a peer outside the mesh."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import time
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import zmq

import meshrl.common.api
from loadtests.doors.plan import ANSWERED, REFUSED, Plan, Process, Tried
from meshrl.common.api.calls.interface import Cast, Interface, Method
from meshrl.common.base.encoding.messages import encode
from meshrl.common.mesh.transport.address import parse_endpoint, parse_key
from meshrl.common.mesh.transport.socket_pump import LENGTH_BYTES
from meshrl.common.mesh.wire.frames import CALL, CAST, pack_header

WAIT_S = 4.0  # for all answers, after everything is sent
DEADLINE_MS = 5_000
TOLD = 400


@cache
def methods() -> list[Method[Any]]:
    for module in pkgutil.walk_packages(meshrl.common.api.__path__, "meshrl.common.api."):
        importlib.import_module(module.name)
    found: dict[str, Method[Any]] = {}
    for interface in _below(Interface):
        found |= {method.label: method for method in interface.methods.values()}
    return list(found.values())


def _below(cls: type[Any]) -> Iterator[type[Any]]:
    for child in cls.__subclasses__():
        yield child
        yield from _below(child)


def blank(hint: Any) -> Any:
    """Return a value of a field's type that a service can decode."""
    origin = get_origin(hint)
    if origin is np.ndarray:
        return np.zeros(0, np.float32)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        return hint(**{one.name: blank(hints[one.name]) for one in dataclasses.fields(hint)})
    if origin in (Union, types.UnionType) or hint is Any:
        return None
    if origin is tuple:
        return tuple(blank(arg) for arg in get_args(hint) if arg is not Ellipsis)
    return (origin or hint)()


def keyless(socket: zmq.Socket[bytes], key: bytes) -> None:
    """Set up a socket as a process of a mesh without a secret does."""


def guessing(socket: zmq.Socket[bytes], key: bytes) -> None:
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey, _ = zmq.curve_keypair()


def informed(socket: zmq.Socket[bytes], key: bytes) -> None:
    guessing(socket, key)
    socket.curve_serverkey = key


def call_all(plan: Plan) -> list[Tried]:
    """Call every method of every process in every variant; return the answers, ideally none."""
    ways: list[Callable[[zmq.Socket[bytes], bytes], None]] = [keyless, guessing, informed]
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    asked: dict[zmq.Socket[bytes], tuple[Process, str, dict[int, str]]] = {}
    poller = zmq.Poller()
    for process in plan.processes:
        key = parse_key(process.address)
        for way in ways:
            if way is informed and not key:
                continue
            socket = context.socket(zmq.DEALER)
            socket.linger = 0
            way(socket, key)
            socket.connect(parse_endpoint(process.address))
            asked[socket] = process, way.__name__, _ask(socket, process)
            poller.register(socket, zmq.POLLIN)
    answers: dict[zmq.Socket[bytes], list[str]] = {socket: [] for socket in asked}
    until = time.monotonic() + WAIT_S
    while (left := until - time.monotonic()) > 0:
        for socket, _ in poller.poll(int(left * 1000)):
            answers[socket].append(repr(b" ".join(socket.recv_multipart()))[:TOLD])
    tried = []
    for socket, (process, manner, calls) in asked.items():
        told = answers[socket]
        for number, what in calls.items():
            said = told[number] if number < len(told) else ""
            where = f"{what} of {process.name}, {manner}"
            tried.append(Tried(where, ANSWERED if said else REFUSED, said))
    context.destroy(linger=0)
    return tried


def framed(
    process: Process, method: Method[Any], call_id: int, right: bool, kind: int = CALL
) -> list[bytes | memoryview]:
    """Return the frames of a call with a blank request, by the right incarnation or a wrong one."""
    body, buffers = _request(method)
    target = process.incarnation if right else "0" * len(process.incarnation)
    header = pack_header(kind, call_id, process.name, method.name, "stranger", target, DEADLINE_MS)
    return [len(header).to_bytes(LENGTH_BYTES, "little") + header + body, *buffers]


@cache
def _request(method: Method[Any]) -> tuple[bytes, list[memoryview]]:
    return encode(blank(method.request))


def _ask(socket: zmq.Socket[bytes], process: Process) -> dict[int, str]:
    """Send every call, with the correct and a wrong incarnation; return the calls."""
    sent: dict[int, str] = {}
    for method in methods():
        for right in (True, False):
            number = len(sent)
            kind = CAST if isinstance(method, Cast) else CALL
            frames = framed(process, method, number + 1, right, kind)
            with suppress(zmq.Again):  # its connection was ended: that is an answer for all
                socket.send_multipart(frames, zmq.NOBLOCK)
            sent[number] = f"{method.label} ({'right' if right else 'wrong'} incarnation)"
    return sent
