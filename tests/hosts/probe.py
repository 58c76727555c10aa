"""Probe of a network: a program that serves on one host and measures from another.

Usage:

    python -m tests.hosts.probe serve PORT
    python -m tests.hosts.probe send HOST PORT BYTES     # bytes per second
    python -m tests.hosts.probe ask HOST PORT TIMES      # seconds of each round trip
    python -m tests.hosts.probe datagrams HOST PORT TIMES  # number that arrive

`serve` accepts connections: 8 bytes have the length of the following data, and one byte answers it.
`datagrams` counts the datagrams that the server has sent back. All commands print lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time

SIZE = 8  # bytes of a length
CONNECT_S = 2.0
LAST_S = 0.5  # no datagram arrives after this time
CHUNK = 1 << 16


def serve(port: int) -> None:
    """Serve until the process is killed; print `ready` when it listens."""
    threading.Thread(target=_return_datagrams, args=(port,), daemon=True).start()
    with socket.create_server(("0.0.0.0", port)) as listening:
        print("ready", flush=True)
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while head := connection.recv(SIZE, socket.MSG_WAITALL):
            left = int.from_bytes(head, "big")
            while left:
                left -= len(connection.recv(min(left, CHUNK)))
            connection.sendall(b"k")


def _return_datagrams(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as back:
        back.bind(("0.0.0.0", port))
        while True:
            said, peer = back.recvfrom(SIZE)
            back.sendto(said, peer)


def connect(host: str, port: int) -> socket.socket:
    """Return a connection to the server; OSError without one."""
    found = socket.create_connection((host, port), timeout=CONNECT_S)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found.settimeout(None)
    return found


def measure_send_s(connection: socket.socket, count: int) -> float:
    """Return the seconds until that many bytes are acknowledged."""
    started_s = time.monotonic()
    connection.sendall(count.to_bytes(SIZE, "big") + bytes(count))
    if connection.recv(1) != b"k":
        raise ConnectionError("nobody answers")
    return time.monotonic() - started_s


def count_datagrams(host: str, port: int, times: int) -> int:
    """Return how many of `times` datagrams come back."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        found = 0
        for number in range(times):
            asking.sendto(number.to_bytes(SIZE, "big"), (host, port))
            asking.settimeout(0.0005)  # keeps every queue on the path short
            found += _receive_count(asking)
        asking.settimeout(LAST_S)
        return found + _receive_count(asking)


def _receive_count(asking: socket.socket) -> int:
    found = 0
    with contextlib.suppress(TimeoutError):
        while asking.recv(SIZE):
            found += 1
    return found


def main() -> None:
    match sys.argv[1:]:
        case ["serve", port]:
            serve(int(port))
        case ["send", host, port, count]:
            with connect(host, int(port)) as connection:
                print(json.dumps(int(count) / measure_send_s(connection, int(count))))
        case ["ask", host, port, times]:
            with connect(host, int(port)) as connection:
                for _ in range(int(times)):
                    print(json.dumps(measure_send_s(connection, 1)), flush=True)
        case ["datagrams", host, port, times]:
            print(json.dumps(count_datagrams(host, int(port), int(times))))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
