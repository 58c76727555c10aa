"""Unauthenticated peer: another user of the host that runs every attempt of a plan.

It starts as root with the plan on standard input, because only root may be able to read its
imports. It drops its privileges before its first attempt.
"""

from __future__ import annotations

import ctypes
import encodings.idna  # noqa: F401 (a connection looks for it, when it is out of reach)
import json
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial

from loadtests.doors.calls import call_all, methods
from loadtests.doors.plan import ANSWERED, GREETED, METRICS, NOBODY, REFUSED, Plan, Port, Tried

PR_SET_NO_NEW_PRIVS = 38
WAIT_S = 1.5  # for whatever comes
TOLD = 4000  # characters of an answer that are kept
THREADS = 24
GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL"
TLS_ALERT = b"\x15\x03"  # how it says that it was not addressed in TLS
REDIS_REFUSES = (b"-NOAUTH", b"-WRONGPASS", b"-NOPERM")
SAID: dict[str, bytes] = {
    "nothing": b"",
    "noise": bytes(range(256)),
    "GET /": b"GET / HTTP/1.0\r\n\r\n",
    "GET /metrics": b"GET /metrics HTTP/1.0\r\n\r\n",
    "GET /get_model_info": b"GET /get_model_info HTTP/1.0\r\n\r\n",
    "POST /generate": b'POST /generate HTTP/1.0\r\nContent-Length: 12\r\n\r\n{"text":"a"}',
    "redis INFO": b"INFO\r\n",
    "redis KEYS": b"KEYS *\r\n",
    "redis CONFIG": b"CONFIG GET *\r\n",
    "redis ACL": b"ACL LIST\r\n",
    "redis HELLO": b"HELLO 3\r\n",
    "redis AUTH": b"AUTH default redis\r\nGET a\r\n",
    "redis EVAL": b"EVAL \"return redis.call('keys', '*')\" 0\r\n",
    "redis FLUSHALL": b"FLUSHALL\r\n",
    "zmq NULL": GREETING.ljust(64, b"\0") + b"\4\x1c\5READY\x0bSocket-Type\0\0\0\6DEALER",
    "bulk GET, old": b"MRB1G" + bytes(16) + bytes(8),
    "bulk HAS": b"H" + bytes(16) + bytes(8),
    "bulk hello": b"MRB2" + bytes(48) + bytes(32) + b"G" + bytes(24),
    "gloo sequence": bytes(8),
    "gloo sequence 1": (1).to_bytes(8, "little"),
}
PRIVATE = ("environ", "maps", "mem", "stack", "syscall", "io")
LINKS = ("cwd", "root", "exe")
ANYBODY = ssl.create_default_context()  # TLS without verification of the peer
ANYBODY.check_hostname, ANYBODY.verify_mode = False, ssl.CERT_NONE


def become_nobody() -> None:
    """Drop all privileges for good, in a session of its own: sharers of one may send SIGCONT."""
    os.setsid()
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.chdir("/")


def heard(connection: socket.socket) -> bytes:
    received = b""
    connection.settimeout(WAIT_S)
    with suppress(OSError):
        while len(received) < TOLD and (more := connection.recv(1 << 16)):
            received += more
    return received


def outcome(port: Port, said: bytes) -> str:
    if not said:
        return REFUSED
    if port.serves == "metrics":
        return METRICS
    if said[:1] == b"\xff" and len(said) <= len(GREETING) + 52 and port.serves == "calls":
        return GREETED
    lines = [line for line in said.split(b"\r\n") if line]
    if all(line.startswith(REDIS_REFUSES) for line in lines):
        return REFUSED
    if port.serves == "redis" and said[:2] == TLS_ALERT:
        return GREETED
    if port.serves == "redis" and all(line.startswith((*REDIS_REFUSES, b"-ERR")) for line in lines):
        return GREETED
    if said.startswith((b"HTTP/1.0 401", b"HTTP/1.1 401")):
        return REFUSED
    return ANSWERED


def at_port(port: Port, what: str, tls: bool = False) -> Tried:
    """Send one message to one port, over unverified TLS if `tls`."""
    said = b""
    with suppress(OSError):
        connection = socket.create_connection((port.host, port.port), timeout=WAIT_S)
        with ANYBODY.wrap_socket(connection) if tls else connection as end:
            end.sendall(SAID[what])
            said = heard(end)
    over = f"{port.host}:{port.port}{' over TLS' if tls else ''}"
    where = f"{what} at {over} ({port.serves or 'other'} of {port.owner})"
    return Tried(where, outcome(port, said), said[:TOLD].decode("latin-1"))


def at_socket(path: str) -> Tried:
    """Connect to a unix socket, and send a request that Redis would answer."""
    told = b""
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as connection:
            connection.settimeout(WAIT_S)
            try:
                connection.connect(path.replace("@", "\0", 1) if path[0] == "@" else path)
                connection.sendall(b"PING\r\n")
            except OSError:
                continue
            told += heard(connection)
    refused = not told or told.startswith(REDIS_REFUSES)
    return Tried(f"unix {path}", REFUSED if refused else ANSWERED, told[:TOLD].decode("latin-1"))


def done(what: str, deed: Callable[[], object]) -> Tried:
    try:
        told = deed()
    except OSError:
        return Tried(what, REFUSED)
    return Tried(what, ANSWERED, repr(told)[:TOLD])


def opened(path: str, flags: int) -> Callable[[], None]:
    return lambda: os.close(os.open(path, flags | os.O_NONBLOCK))


def at_file(path: str) -> Iterator[Tried]:
    """Read, write, list, add to and remove the file or directory at a path."""
    if os.path.basename(path) == "null":
        return
    yield done(f"read {path}", opened(path, os.O_RDONLY))
    yield done(f"write {path}", opened(path, os.O_WRONLY | os.O_APPEND))
    yield done(f"list {path}", lambda: os.listdir(path))
    yield done(f"add to {path}", opened(f"{path}/stranger", os.O_CREAT | os.O_WRONLY))
    yield done(f"replace {path}", lambda: os.rename(path, f"{path}.stranger"))


def at_process(pid: int, name: str) -> Iterator[Tried]:
    """Read a process's files in /proc, and signal it."""
    for file in PRIVATE:
        place = f"/proc/{pid}/{file}"
        yield done(f"{place} ({name})", partial(_bytes_of, place))
    for link in LINKS:
        place = f"/proc/{pid}/{link}"
        yield done(f"{place} ({name})", partial(os.readlink, place))
    yield done(f"/proc/{pid}/fd ({name})", lambda: os.listdir(f"/proc/{pid}/fd"))
    yield done(f"signal {pid} ({name})", lambda: os.kill(pid, signal.SIGCONT))


def _bytes_of(path: str) -> bytes:
    with open(path, "rb") as file:
        found = file.read(64)
    if not found:
        raise PermissionError(path)  # the kernel shows an empty file without permission
    return found


def try_all(plan: Plan) -> list[Tried]:
    """Try everything in the plan as this process's user."""
    tried = [tried for path in plan.files for tried in at_file(path)]
    tried += [tried for one in plan.pids.items() for tried in at_process(*one)]
    tried += [at_socket(path) for path in plan.sockets]
    with ThreadPoolExecutor(THREADS) as threads:
        pairs = [(port, what) for port in plan.ports for what in SAID]
        tried += threads.map(lambda pair: at_port(*pair), pairs)
    return [*tried, *call_all(plan)]


def main() -> None:
    plan = Plan.decode(json.load(sys.stdin))
    methods()  # imported while it can be
    become_nobody()
    json.dump([asdict(tried) for tried in try_all(plan)], sys.stdout)


if __name__ == "__main__":
    main()
