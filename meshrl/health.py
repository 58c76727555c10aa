"""`python -m meshrl.health URL`: probe of a health page, for images without curl.

It exits with status 0 when the page answers 200, else 1, and prints the answer. It uses only the
standard library: a probe runs every few seconds.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

TIMEOUT_S = 2.5  # orchestrators give a probe three seconds and less
MAX_BYTES = 1 << 16  # a page of metrics is longer; a reason is a line


def probe_url(url: str) -> tuple[bool, str]:
    """Return True if `url` answers 200 in time, and the text of the answer."""
    shown = "***" if "@" in url else url.partition("?")[0]  # no user or password is needed
    try:
        where = urlsplit(url)
        port = 80 if where.port is None else where.port
    except ValueError:
        where, port = urlsplit(""), 0
    if where.scheme != "http" or not where.hostname or not port:
        return False, f"{shown!r} is not a URL such as http://HOST:PORT/readyz"
    connection = HTTPConnection(where.hostname, port, timeout=TIMEOUT_S)
    # a slow trickle of bytes does not trigger a time-out
    late = threading.Timer(TIMEOUT_S, _shut_down_connection, [connection])
    late.daemon = True
    late.start()
    began = time.monotonic()
    try:
        connection.request("GET", where.path or "/livez", headers={"Connection": "close"})
        answer = connection.getresponse()
        said = answer.read(MAX_BYTES).decode(errors="replace").strip()
    except (OSError, HTTPException) as error:
        said = str(error) or type(error).__name__
        return False, f"{shown} does not answer ({time.monotonic() - began:.1f} s): {said}"
    finally:
        late.cancel()
        connection.close()
    if answer.status != 200:
        return False, f"{answer.status} {said}"
    return (
        (False, "the answer did not end in time")
        if time.monotonic() - began > TIMEOUT_S
        else (True, said)
    )


def _shut_down_connection(connection: HTTPConnection) -> None:
    if connection.sock is not None:
        connection.sock.shutdown(socket.SHUT_RDWR)


def main() -> int:
    """Run the probe and return its exit status."""
    if len(sys.argv) != 2:
        print("usage: python -m meshrl.health http://HOST:PORT/readyz", file=sys.stderr)
        return 1
    well, said = probe_url(sys.argv[1])
    print(said)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
