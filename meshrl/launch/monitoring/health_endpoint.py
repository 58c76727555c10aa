"""`--health HOST:PORT`: the root process of a host answers for all of it.

`/livez`: its own event loop runs. `/readyz`: the host does its work, else the reason in words.
`/metrics`: the pages of all its processes in one, and at the head the mesh's own figures.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from meshrl.common.base.clock import Clock
from meshrl.common.base.host.listen_addresses import parse_listen_address, parse_socket_host
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.telemetry.exposition import Exposition
from meshrl.common.mesh.telemetry.metrics_endpoint import MetricsEndpoint, make_health_page
from meshrl.launch.monitoring.host_health import POLL_S, HostHealth, MonitoredProcess
from meshrl.launch.root_process import RootProcess
from meshrl.view import disk_full
from meshrl.view.metrics.mesh_gauges import HeadReader, make_metric_families

PAGE_CACHE_S = 1.0  # several monitors, or frequent requests of one, cost the processes one answer
SHARED_MEMORY = Path("/dev/shm")
SCRAPE_TIMEOUT_S = 1.0  # a process that takes longer counts as one that is down
MAX_PAGE_BYTES = 8 << 20  # a page is some 10 kB
ANY_INTERFACE = ("", "0.0.0.0", "::")  # an interface that is all of them
GET_METRICS = b"GET /metrics HTTP/1.0\r\n\r\n"
OWN_LABELS = ("service", "kind", "job")


class HostMetricsPage:
    """Metrics page of a host, built on request at most once a second by the endpoint's threads."""

    def __init__(
        self,
        name: str,
        health: HostHealth,
        clock: Clock,
        metrics_address: Callable[[], str],
        root: Path,
    ) -> None:
        """`name`: the root process's own. `metrics_address`: as `mesh.metrics` of this host; empty:
        not known yet.
        """
        self._name, self._health, self._clock = name, health, clock
        self._metrics_address, self._root = metrics_address, root
        self._lock = Lock()
        self._cached_page: tuple[int, str, bytes] = (503, "", b"")
        self._cached_at_s = -PAGE_CACHE_S

    def render(self) -> tuple[int, str, bytes]:
        with self._lock:
            if self._clock.monotonic() - self._cached_at_s >= PAGE_CACHE_S:
                self._cached_page = self._render_page()
                self._cached_at_s = self._clock.monotonic()
            return self._cached_page

    def _render_page(self) -> tuple[int, str, bytes]:
        merged, standing, where = MergedExposition(), self._health, self._metrics_address()
        root = {"service": self._name, "kind": "root", "job": ""}
        gauges = {
            "live": not standing.explain_not_live(),
            "ready": not standing.explain_not_ready(),
            "loop_lag_seconds": standing.watchdog.current_lag_s,
        }
        merged.add(Exposition(labels=root, counters={}, gauges=gauges).collect())
        processes, ups = standing.list_processes() if where else [], [(root, True)]
        for process, page in zip(processes, scrape_pages(processes, where), strict=True):
            ups.append((process.labels, _add_process_page(merged, page, process.labels)))
        merged.add([_make_gauge("up", "1 for a process that answers, or has a valid lease", ups)])
        merged.add(self._collect_host())
        if (head := standing.find_head_snapshot()) is not None:
            merged.add(make_metric_families(head))
        return merged.render()

    def _collect_host(self) -> Iterator[Any]:
        answers, head = not self._health.redis_silence_reason, self._health.find_head_snapshot()
        yield _make_gauge("redis_up", "1 while Redis answers this host", [({}, answers)])
        runs = [Path(job.run_dir).parent for job in head.mesh.jobs if job.run_dir] if head else []
        disks = list(_list_file_systems([self._root, *runs, SHARED_MEMORY]))
        free = [({"path": str(p)}, free) for p, free, _ in disks]
        size = [({"path": str(p)}, size) for p, _, size in disks]
        yield _make_gauge("disk_free_bytes", "Free bytes of the file system at this path", free)
        yield _make_gauge("disk_size_bytes", "Size of the file system at this path", size)


def _add_process_page(
    merged: MergedExposition, page: str | None, labels: Mapping[str, str]
) -> bool:
    """Add the page of a process, if it has one, and return whether the process is up."""
    try:
        merged.add_page(page or "", labels)
    except ValueError:
        return False
    return page is not None


def _list_file_systems(paths: Iterable[Path]) -> Iterator[tuple[Path, int, int]]:
    """Yield (path, free, size) of each file system, once."""
    known_devices: set[int] = set()
    for path in paths:
        with suppress(OSError):  # it is not there
            device = os.stat(path).st_dev
            if device not in known_devices:
                found = os.statvfs(path)
                yield path, disk_full.measure_free_bytes(path), found.f_blocks * found.f_frsize
                known_devices.add(device)


def _make_gauge(name: str, description: str, rows: Iterable[tuple[dict[str, str], float]]) -> Any:
    from prometheus_client.metrics_core import GaugeMetricFamily

    family = GaugeMetricFamily(f"meshrl_{name}", description)
    for labels, number in rows:
        family.add_sample(family.name, labels, float(number))
    return family


class MergedExposition:
    """One valid Prometheus exposition merged from several."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}  # by the name that its TYPE line has

    def add_page(self, text: str, labels: Mapping[str, str]) -> None:
        """Add the page of one process with its labels `service` and `kind`.

        A sample that names no job gets the job of `labels`. Raises ValueError, and adds nothing, if
        the text is no page of metrics.
        """
        from prometheus_client.parser import text_string_to_metric_families

        own = {name: labels.get(name, "") for name in OWN_LABELS}
        try:
            families = list(text_string_to_metric_families(text))
        except (KeyError, IndexError, AttributeError) as error:  # of its parser, too
            raise ValueError(f"invalid metrics page: {error}") from error
        for family in families:
            family.samples = [
                s._replace(labels={**s.labels, **own, "job": s.labels.get("job") or own["job"]})
                for s in family.samples
            ]
            self.add([family])

    def add(self, families: Iterable[Any]) -> None:
        """Add families of `prometheus_client`, with the labels that they have."""
        for family in families:
            header = family.name + ("_total" if family.type == "counter" else "")
            known = self._families.setdefault(header, family)
            if known is not family:
                known.samples += family.samples
                if known.type != family.type:  # two kinds of processes disagree
                    known.type = "unknown"

    def collect(self) -> Iterable[Any]:
        """Return the families, as `prometheus_client` requests them from a collector."""
        return self._families.values()

    def render(self) -> tuple[int, str, bytes]:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return 200, CONTENT_TYPE_LATEST, generate_latest(self)


def scrape_pages(processes: Sequence[MonitoredProcess], metrics_address: str) -> list[str | None]:
    """Return the page of each process within `SCRAPE_TIMEOUT_S`; empty if it has none, None if it
    is down.

    `metrics_address`: as `mesh.metrics`, of this host. Only this host is scraped, whatever address
    a record has.
    """

    async def all_pages() -> list[str | None]:
        return list(
            await asyncio.gather(
                *(_scrape_process(process, metrics_address) for process in processes)
            )
        )

    return asyncio.run(all_pages())


async def _scrape_process(process: MonitoredProcess, metrics_address: str) -> str | None:
    if not process.is_alive or not process.metrics_address:
        return "" if process.is_alive else None
    host, family = parse_socket_host(parse_listen_address(metrics_address, "mesh.metrics")[0])
    if host in ANY_INTERFACE:
        host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            return await _fetch_page(host, urlsplit(process.metrics_address).port or 0)
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return None


async def _fetch_page(host: str, port: int) -> str:
    """Return the page at an address. Raises ValueError if the answer is no page."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(GET_METRICS)
        await writer.drain()
        answer = bytearray()
        while part := await reader.read(1 << 16):
            answer += part
            if len(answer) > MAX_PAGE_BYTES:
                raise ValueError("the page exceeds the size limit")
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    if head.split(b" ")[1:2] != [b"200"]:
        raise ValueError("the answer is not status 200")
    return body.decode()


HEALTH_OPTION = "--health"


@asynccontextmanager
async def serve_health(
    root: RootProcess,
    stop: asyncio.Event,
    address: str,
    is_head: bool,
    *,
    stall_s: float = MeshSettings.stall_s,
    poll_s: float = POLL_S,
) -> AsyncIterator[str]:
    """Serve health at `address` from before the host's start until its end; yield the bound
    address.

    `address`: HOST:PORT; empty: nowhere. `stall_s`: longest standstill of the event loop. `poll_s`:
    seconds between two polls of Redis. Raises ConfigError when the port is taken.
    """
    if not address:
        yield ""
        return
    of_mesh = HeadReader(root.mesh_paths).read_snapshot if is_head else None
    standing = HostHealth(root, stop, of_mesh, stall_s, poll_s)

    def metrics() -> str:
        return root.connection[1].metrics if root.connection is not None else ""

    name = "launcher" if is_head else "hosting"
    pages = {
        "/metrics": HostMetricsPage(
            name, standing, root.clock, metrics, root.mesh_paths.root
        ).render,
        "/livez": make_health_page(standing.explain_not_live),
        "/readyz": make_health_page(standing.explain_not_ready),
    }
    endpoint = MetricsEndpoint(address, "", root.host, pages, HEALTH_OPTION)
    tasks = [
        asyncio.create_task(standing.watch_root_process()),
        asyncio.create_task(standing.poll_forever()),
    ]
    try:
        yield endpoint.address
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        endpoint.close()
