"""HTTP endpoint for monitors: /metrics, /livez and /readyz.

A separate thread serves them, so that they answer while the event loop blocks.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from meshrl.common.base.host.listen_addresses import (
    bind_error_type,
    parse_listen_address,
    parse_socket_host,
)
from meshrl.common.base.host.settings import parse_advertised_host
from meshrl.common.mesh.process.host import Host

POLL_S = 0.5  # seconds between two checks of the thread for its end
CLIENT_TIMEOUT_S = 5.0  # a client that neither sends nor reads for this time is disconnected
MAX_CLIENTS = (
    32  # at once, each on a thread: any process that reaches the port may connect at any rate
)
LISTEN_BACKLOG = 128  # simultaneous connects; one more succeeds at its retry, a second later
PLAIN_TEXT = "text/plain; charset=utf-8"

PageRenderer = Callable[[], tuple[int, str, bytes]]  # status, content type, body


def make_health_page(explain_unhealthy: Callable[[], str]) -> PageRenderer:
    """Make a page of status 200, or of 503 with the reason.

    `explain_unhealthy` runs off the loop and returns an empty text for a healthy process.
    """

    def page() -> tuple[int, str, bytes]:
        reason = explain_unhealthy()
        return (503 if reason else 200), PLAIN_TEXT, f"{reason or 'ok'}\n".encode()

    return page


class MetricsEndpoint:
    """HTTP server of `pages` by path until it is closed.

    `where` is as `mesh.metrics` of a job file, or as another `setting`, which a ConfigError names
    if no port of its range is free. Its published host is `advertise` (as `mesh.advertise`), unless
    it serves this host only.
    """

    def __init__(
        self,
        where: str,
        advertise: str,
        host: Host,
        pages: Mapping[str, PageRenderer],
        setting: str = "mesh.metrics",
    ) -> None:
        self._server = _bind(where, pages, setting)
        self._server.timeout = POLL_S
        interface, _ = parse_listen_address(where, setting)
        try:
            alone = ipaddress.ip_address(interface.strip("[]")).is_loopback
        except ValueError:
            alone = interface == "localhost"
        advertised_host = interface if alone else parse_advertised_host(advertise) or interface
        self.address = f"http://{advertised_host}:{self._server.server_port}"
        self._is_closing = False
        self._thread = host.run_periodically(0.0, self._serve_next, "endpoint")

    def close(self) -> None:
        """Stop the server, which ends at its thread's next poll."""
        self._is_closing = True

    def _serve_next(self) -> bool:
        if self._is_closing:
            self._server.server_close()
            return False
        self._server.handle_request()
        return True


class _MetricsServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = LISTEN_BACKLOG
    pages: Mapping[str, PageRenderer]

    def __init__(self, where: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(where, handler)
        self._connections: dict[Any, None] = {}  # connections of several threads, the oldest first

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a client on a thread; close the oldest connection if there are too many."""
        for oldest in list(self._connections)[: max(0, len(self._connections) + 1 - MAX_CLIENTS)]:
            with suppress(OSError):  # it is closed already
                oldest.shutdown(socket.SHUT_RDWR)
        self._connections[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can start
            del self._connections[request]
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a client until its connection ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._connections[request]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a client that disconnected."""


class _MetricsServerV6(_MetricsServer):
    address_family = socket.AF_INET6


class _PageRequest(BaseHTTPRequestHandler):
    timeout = CLIENT_TIMEOUT_S
    server: _MetricsServer

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            known = " ".join(self.server.pages)
            status, kind, body = 404, PLAIN_TEXT, f"known paths: {known}\n".encode()
        else:
            status, kind, body = page()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: probes arrive every few seconds."""


def _bind(where: str, pages: Mapping[str, PageRenderer], setting: str) -> _MetricsServer:
    interface, tried = parse_listen_address(where, setting)
    host, family = parse_socket_host(interface)
    kind = _MetricsServerV6 if family == socket.AF_INET6 else _MetricsServer
    last_error: OSError | None = None
    for port in tried:
        try:
            server = kind((host, port), _PageRequest)
        except OSError as error:
            last_error = error
            continue
        server.pages = pages
        return server
    raise bind_error_type(last_error)(
        f"no port is free for metrics: {last_error}",
        where=f"{setting} = {where!r}",
        fix="Permit any port with HOST:*, or a wider range with HOST:LOW-HIGH",
    )
