"""Processes are asked all at once, and none is waited for longer than a second."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from meshrl.launch.outward.outward import scrape
from meshrl.launch.outward.standing import MonitoredProcess
from tests.load import scaled

HERE = "127.0.0.1:*"
PAGE = b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nx 1\n"


@contextmanager
def answering(
    *parts: bytes, pause_s: float = 0.0, together: threading.Barrier | None = None
) -> Iterator[int]:
    """A server for one client: it sends the parts one by one, then hangs up. `together`: not before
    the other servers have clients too.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            if together is not None:
                together.wait(scaled(30.0))
            with client:
                client.recv(1000)
                try:
                    for part in parts:
                        client.sendall(part)
                        ended.wait(pause_s)
                except OSError:  # nobody waits for it
                    pass

        ended = threading.Event()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        ended.set()


def process(port: int, name: str = "engine/0") -> MonitoredProcess:
    return MonitoredProcess(name, "engine", metrics=f"http://127.0.0.1:{port}")


def test_what_hangs_drips_or_is_gone_is_down_and_the_rest_is_asked_at_the_same_time() -> None:
    told: tuple[tuple[list[bytes], float], ...] = (
        ([PAGE], 0.0),
        ([b""], 3600.0),
        ([b"H"] * 10_000, 0.2),
        ([b"HTTP/1.0 500 no\r\n\r\n"], 0.0),
        ([b"HTTP/1.0 200 OK\r\n\r\n\xff"], 0.0),
    )
    together = threading.Barrier(len(told))
    with ExitStack() as opened:
        ports = [
            opened.enter_context(answering(*parts, pause_s=pause_s, together=together))
            for parts, pause_s in told
        ]
        with socket.create_server(("127.0.0.1", 0)) as gone:
            ports.append(gone.getsockname()[1])
        began = time.monotonic()
        found = scrape([process(port) for port in ports], HERE)
        took_s = time.monotonic() - began
    assert found == ["x 1\n", None, None, None, None, None]
    assert took_s < scaled(10.0), "it waits for none to its end"


def test_one_without_a_page_is_up_by_its_lease() -> None:
    both = [MonitoredProcess("a", "a"), MonitoredProcess("b", "b", alive=False)]
    assert scrape(both, HERE) == ["", None]


def test_no_other_host_is_asked_whatever_a_record_says() -> None:
    with answering(PAGE) as port:
        elsewhere = MonitoredProcess("a", "a", metrics=f"http://192.0.2.1:{port}")
        assert scrape([elsewhere], "0.0.0.0:*") == ["x 1\n"]
