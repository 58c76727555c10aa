"""Role matrix: each role calls each method of each process over CURVE and must match the callers'
table.

Allowed methods are called with a wrong incarnation only, so that nothing runs that has an effect.
Other methods are called with the right one, too. At the head of a mesh that listens:

    python -m loadtests.doors.matrix .meshrl
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import zmq
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from loadtests.doors.calls import call_all, framed, methods
from loadtests.doors.plan import GREETED, REFUSED, Plan, Port, Process, Tried
from loadtests.doors.planting import LARGEST_BYTES, Planting, plant
from loadtests.doors.stranger import SAID, THREADS, at_port
from loadtests.measuring.entry import options, report
from meshrl.common.api.calls.call_permissions import CALL_PERMISSIONS, ROLES
from meshrl.common.api.calls.interface import Interface
from meshrl.common.api.calls.role import RoleControl
from meshrl.common.api.engine import Engine
from meshrl.common.api.node import Node, Worker
from meshrl.common.api.ranks import Ranks
from meshrl.common.api.sandbox import Sandbox
from meshrl.common.api.scoring import Scoring
from meshrl.common.api.trainer import Trainer
from meshrl.common.api.weights import STORE_NAME, Weights
from meshrl.common.base.errors import NotAllowed, StaleIncarnation
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.job.bundle import bundle_files
from meshrl.common.mesh.access import gateway_identity
from meshrl.common.mesh.access.owner import PERSON_ROLE, make_person_settings
from meshrl.common.mesh.transport.address import (
    format_bulk_key,
    format_key,
    parse_endpoint,
    parse_key,
)
from meshrl.common.mesh.transport.keys import KeyPair
from meshrl.common.mesh.transport.socket_pump import LENGTH_BYTES
from meshrl.common.mesh.wire.frames import unpack_error, unpack_header
from meshrl.common.state import jobs, registry
from meshrl.common.state.hosts import credentials
from meshrl.common.state.hosts.credentials import Credential
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.registry import RegistryEntry
from meshrl.directory.directory_paths import MeshPaths

# Interfaces of the processes of a role; others answer nothing.
ANSWERS: Mapping[str, type[Interface]] = {
    "engine": Engine,
    "hybrid": RoleControl,
    "node": Node,
    "rank": Ranks,
    "sandbox": Sandbox,
    "scoring": Scoring,
    "trainer": Trainer,
    "weights": Weights,
    "worker": Worker,
}
WAIT_S = 30.0  # for all answers, after everything is sent
ASIDE = "matrix"  # in the names of the keys that this shows


@dataclass
class Matrix:
    tried: int = 0
    errors: list[str] = field(default_factory=list)
    planting: Planting = field(default_factory=Planting)


async def role_matrix(
    states: Mapping[str, StateClient],
    host: str,
    processes: Sequence[Process],
    store: RegistryEntry | None = None,
    files: Mapping[str, int] = MappingProxyType({}),
) -> Matrix:
    """Try every (role, process, method).

    Args:
        states: For each role, the client with which a process of it on `host` accesses Redis.
            The keys are registered there during the test.
        store, files: See `planting.plant`.
    """
    pairs = {role: KeyPair.generate() for role in sorted(ROLES)}
    bulk = {role: X25519PrivateKey.generate() for role in pairs}
    rows = {
        role: Credential(
            role,
            host,
            format_key(pair.public),
            f"{role}/{ASIDE}",
            format_bulk_key(bulk[role].public_key().public_bytes_raw()),
        )
        for role, pair in pairs.items()
    }
    for role, row in rows.items():
        await credentials.register_key(states[role], row)
    try:
        matrix = await asyncio.to_thread(_ask_all, pairs, processes)
        if store is not None:
            matrix.planting = await asyncio.to_thread(plant, bulk, store, files)
        return matrix
    finally:
        for role, row in rows.items():
            await credentials.withdraw_key(states[role], row)


def without_key(processes: Sequence[Process]) -> tuple[int, list[str]]:
    """Count calls without a key in every way of asking, and name those that were answered."""
    tried = call_all(Plan(processes=list(processes)))
    return len(tried), [one.what for one in tried if one.outcome != REFUSED]


@dataclass(frozen=True)
class _Ask:
    what: str
    expected: str


def _ask_all(pairs: Mapping[str, KeyPair], processes: Sequence[Process]) -> Matrix:
    matrix = Matrix()
    waiting: dict[zmq.Socket[bytes], dict[int, _Ask]] = {}
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, 4096)
        poller = zmq.Poller()
        for process in processes:
            for role, pair in pairs.items():
                socket = context.socket(zmq.DEALER)
                socket.linger = 0
                socket.curve_serverkey = parse_key(process.address)
                socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
                socket.connect(parse_endpoint(process.address))
                waiting[socket] = _ask(socket, role, process)
                poller.register(socket, zmq.POLLIN)
                matrix.tried += len(waiting[socket])
        until = time.monotonic() + WAIT_S
        while any(waiting.values()) and (left := until - time.monotonic()) > 0:
            for socket, _ in poller.poll(int(left * 1000)):
                call_id, said = _answer(socket.recv_multipart())
                ask = waiting[socket].pop(call_id)
                if said != ask.expected:
                    matrix.errors.append(f"{ask.what}: {said}, not {ask.expected}")
        for socket, asks in waiting.items():
            matrix.errors += [f"{ask.what}: no answer, not {ask.expected}" for ask in asks.values()]
            socket.close(0)
    return matrix


def _ask(socket: zmq.Socket[bytes], role: str, process: Process) -> dict[int, _Ask]:
    """Send every call of one role to one process; return the expected answers by call id."""
    sent: dict[int, _Ask] = {}
    kind = process.name.partition("/")[0]
    answered = ANSWERS.get(kind, Interface).methods
    for method in methods():
        found = answered.get(method.name)
        allowed = found is not None and role in CALL_PERMISSIONS[found.label]
        expected = StaleIncarnation.code if allowed else NotAllowed.code
        # An allowed call would run with the right incarnation.
        for right in (False,) if allowed else (True,) if found is None else (True, False):
            call_id = len(sent) + 1
            socket.send_multipart(framed(process, method, call_id, right))
            what = f"{method.label} of {process.name} by a {role}, {'right' if right else 'wrong'}"
            sent[call_id] = _Ask(what, expected)
    return sent


def _answer(frames: list[bytes]) -> tuple[int, str]:
    """Return (call id, code) of an error; name any other answer."""
    ends = LENGTH_BYTES + int.from_bytes(frames[0][:LENGTH_BYTES], "little")
    header = unpack_header(frames[0][LENGTH_BYTES:ends])
    body = frames[0][ends:] or frames[1]
    call_id = int(header[2])
    try:
        return call_id, unpack_error(body)[0]
    except Exception as error:  # whatever it is, it is no refusal
        return call_id, f"an answer that is no error ({error})"


async def tried(root: Path) -> dict[str, Any]:
    place = MeshPaths(root)
    settings = MeshSettings.from_file(place.settings)
    async with AsyncExitStack() as opened:
        states: dict[str, StateClient] = {}
        for role in sorted(ROLES):
            person = role == PERSON_ROLE
            about = make_person_settings(settings, place.directory) if person else settings
            states[role] = await StateClient.open(about.make_redis_url(role))
            opened.push_async_callback(states[role].close)
        entries = [
            entry for entry in await registry.list_entries(states[PERSON_ROLE]) if entry.alive
        ]
        processes = [Process(e.name, e.address, e.incarnation) for e in entries]
        [store] = [entry for entry in entries if entry.name == STORE_NAME]
        rows = await jobs.read_jobs(states[PERSON_ROLE])
        listed = [
            file for row in rows for file in bundle_files.read_file_list(row.document).values()
        ]
        files = {digest: size for size, digest in listed if 0 < size <= LARGEST_BYTES}
        matrix = await role_matrix(states, settings.host, processes, store, files)
    asked, answered = await asyncio.to_thread(without_key, processes)
    ports = list(_ports(entries, place))
    for one in await asyncio.to_thread(_knocked, ports):
        asked += 1
        if one.outcome not in (REFUSED, GREETED):
            answered.append(one.what)
    planted = [f"{what}: planted" for what in matrix.planting.planted]
    without = [f"{what}: answered without a key" for what in answered]
    for error in [*matrix.errors, *planted, *without]:
        print(error, file=sys.stderr)
    return {
        "processes": len(processes),
        "ports": len(ports),
        "role_matrix_tried": matrix.tried,
        "role_matrix_errors": len(matrix.errors),
        "planting_tried": matrix.planting.tried,
        "planted": len(planted),
        "without_key_tried": asked,
        "refused_without_key": round(1 - len(answered) / asked, 6) if asked else 0.0,
    }


def _ports(entries: Sequence[RegistryEntry], place: MeshPaths) -> Iterator[Port]:
    """Yield the ports of processes, of the gateway, and of the mesh's own Redis for hosts."""
    for entry in entries:
        yield from _port(entry.address, "calls", entry.name)
        yield from _port(entry.bulk, "bulk", entry.name)
    if found := gateway_identity.find_identity(place.directory):
        yield from _port(found.address, "calls", "the gateway")
    written = place.directory / "redis.conf"
    if written.exists():
        lines = [line.split() for line in written.read_text().splitlines() if line]
        set_to = {words[0]: words[1] for words in lines if len(words) > 1}
        if port := int(set_to.get("tls-port", "0")):
            yield Port(set_to["bind"], port, "redis", "the mesh")


def _port(address: str, serves: str, owner: str) -> Iterator[Port]:
    host, _, port = parse_endpoint(address).removeprefix("tcp://").rpartition(":")
    if port.isdigit():
        yield Port(host.strip("[]"), int(port), serves, owner)


def _knocked(ports: Sequence[Port]) -> list[Tried]:
    """Try all messages of an unauthenticated peer at these ports, for Redis also over TLS."""
    pairs = [(port, what, False) for port in ports for what in SAID]
    pairs += [(port, what, True) for port in ports if port.serves == "redis" for what in SAID]
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(lambda pair: at_port(*pair), pairs))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("root", type=Path, help="of a mesh that was started with `--listen`")
    figures = asyncio.run(tried(parser.parse_args().root))
    report(figures)
    wrong = figures["role_matrix_errors"] + figures["planted"]
    sys.exit(0 if wrong == 0 == 1 - figures["refused_without_key"] else 1)


if __name__ == "__main__":
    main()
