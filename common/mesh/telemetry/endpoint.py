"""The HTTP endpoint for monitors: /metrics, /livez and /readyz, served by a thread of its own, so
that they answer while the event loop stands still.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from meshrl.common.base.host.ports import bare, ports, refused
from meshrl.common.base.host.settings import advertised_host
from meshrl.common.mesh.process.host import Host

TURN_S = 0.5  # how often the thread looks whether it should end
CLIENT_S = 5.0  # a client that neither sends nor reads for so long is hung up on
CLIENTS = 32  # at once, each on a thread: whoever reaches the port may knock as often as they like
QUEUE = 128  # that knock at one moment: one more is heard when it knocks again, a second later
PLAIN = "text/plain; charset=utf-8"

Page = Callable[[], tuple[int, str, bytes]]  # status, content type, body


def health(why_not: Callable[[], str]) -> Page:
    """200, or 503 with what is wrong; `why_not` runs off the loop and is empty when all is well."""

    def page() -> tuple[int, str, bytes]:
        reason = why_not()
        return (503 if reason else 200), PLAIN, f"{reason or 'ok'}\n".encode()

    return page


class MetricsEndpoint:
    """Serves `pages` by path until it is closed. `where`: as `mesh.metrics` of a job file, or of
    another `setting`, which a ConfigError names when no port of its range is free. Others are told
    `advertise` (as `mesh.advertise`) unless it serves this host alone.
    """

    def __init__(
        self,
        where: str,
        advertise: str,
        host: Host,
        pages: Mapping[str, Page],
        setting: str = "mesh.metrics",
    ) -> None:
        self._server = _bound(where, pages, setting)
        self._server.timeout = TURN_S
        interface, _ = ports(where, setting)
        try:
            alone = ipaddress.ip_address(interface.strip("[]")).is_loopback
        except ValueError:
            alone = interface == "localhost"
        shown = interface if alone else advertised_host(advertise) or interface
        self.address = f"http://{shown}:{self._server.server_port}"
        self._closing = False
        self._thread = host.every(0.0, self._turn, "endpoint")

    def close(self) -> None:
        """Stops the server, which ends at its thread's next look."""
        self._closing = True

    def _turn(self) -> bool:
        if self._closing:
            self._server.server_close()
            return False
        self._server.handle_request()
        return True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = QUEUE
    pages: Mapping[str, Page]

    def __init__(self, where: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(where, handler)
        self._served: dict[Any, None] = {}  # connections, the oldest first; of several threads

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a client on a thread; the one that has been there for longest makes room."""
        for oldest in list(self._served)[: max(0, len(self._served) + 1 - CLIENTS)]:
            with suppress(OSError):  # it has gone by itself
                oldest.shutdown(socket.SHUT_RDWR)
        self._served[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread is to be had
            del self._served[request]
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves a client to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._served[request]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_S
    server: _Server

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            known = " ".join(self.server.pages)
            status, kind, body = 404, PLAIN, f"there is {known}\n".encode()
        else:
            status, kind, body = page()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds: nothing of them belongs in a log."""


def _bound(where: str, pages: Mapping[str, Page], setting: str) -> _Server:
    interface, tried = ports(where, setting)
    host, family = bare(interface)
    kind = _Server6 if family == socket.AF_INET6 else _Server
    trouble: OSError | None = None
    for port in tried:
        try:
            server = kind((host, port), _Handler)
        except OSError as error:
            trouble = error
            continue
        server.pages = pages
        return server
    raise refused(trouble)(
        f"no port to serve metrics from: {trouble}",
        where=f"{setting} = {where!r}",
        fix="Take any port with HOST:*, or a wider range with HOST:LOW-HIGH",
    )
