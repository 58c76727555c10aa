"""What a network does to connections: a program that serves on one host, and asks from another.

    python -m tests.hosts.probe serve PORT
    python -m tests.hosts.probe send HOST PORT BYTES     # bytes a second
    python -m tests.hosts.probe ask HOST PORT TIMES      # seconds, for each round trip
    python -m tests.hosts.probe datagrams HOST PORT TIMES  # how many of them arrive

`serve` takes connections: 8 bytes say how many come behind them, and a byte answers them all.
`datagrams` counts those that its peer, which sends back what it gets, has answered. All prints
lines of JSON.
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
LAST_S = 0.5  # after which no datagram comes any more
CHUNK = 1 << 16


def serve(port: int) -> None:
    """Until it is killed; prints `ready` when it listens."""
    threading.Thread(target=_datagrams_back, args=(port,), daemon=True).start()
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


def _datagrams_back(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as back:
        back.bind(("0.0.0.0", port))
        while True:
            said, peer = back.recvfrom(SIZE)
            back.sendto(said, peer)


def connected(host: str, port: int) -> socket.socket:
    """A connection to who serves there; OSError."""
    found = socket.create_connection((host, port), timeout=CONNECT_S)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found.settimeout(None)
    return found


def sent(connection: socket.socket, count: int) -> float:
    """Seconds until that many bytes are answered."""
    began = time.monotonic()
    connection.sendall(count.to_bytes(SIZE, "big") + bytes(count))
    if connection.recv(1) != b"k":
        raise ConnectionError("nobody answers")
    return time.monotonic() - began


def arrived(host: str, port: int, times: int) -> int:
    """How many datagrams of so many come back."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        found = 0
        for number in range(times):
            asking.sendto(number.to_bytes(SIZE, "big"), (host, port))
            asking.settimeout(0.0005)  # no queue on the way is ever full
            found += _came(asking)
        asking.settimeout(LAST_S)
        return found + _came(asking)


def _came(asking: socket.socket) -> int:
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
            with connected(host, int(port)) as connection:
                print(json.dumps(int(count) / sent(connection, int(count))))
        case ["ask", host, port, times]:
            with connected(host, int(port)) as connection:
                for _ in range(int(times)):
                    print(json.dumps(sent(connection, 1)), flush=True)
        case ["datagrams", host, port, times]:
            print(json.dumps(arrived(host, int(port), int(times))))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
