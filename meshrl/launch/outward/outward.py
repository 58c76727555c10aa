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
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from meshrl.common.base.clock import Clock
from meshrl.common.base.host.ports import bare, ports
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.telemetry.endpoint import MetricsEndpoint, health
from meshrl.common.mesh.telemetry.exposition import Exposition
from meshrl.launch.outward.standing import LOOK_S, MonitoredProcess, Standing
from meshrl.launch.root import RootProcess
from meshrl.view import storage
from meshrl.view.metrics.mesh_gauges import families, read_head

KEPT_S = 1.0  # several monitors, and one that asks in haste, cost the processes one answer
SHARED_MEMORY = Path("/dev/shm")
ANSWER_S = 1.0  # a process that takes longer counts as one that is down
MOST_BYTES = 8 << 20  # a page is some 10 kB
ANYWHERE = ("", "0.0.0.0", "::")  # an interface that is all of them
GET = b"GET /metrics HTTP/1.0\r\n\r\n"
OURS = ("service", "kind", "job")


class HostPage:
    """Made anew for who asks, once a second at most. Called by the endpoint's threads."""

    def __init__(
        self, name: str, standing: Standing, clock: Clock, where: Callable[[], str], root: Path
    ) -> None:
        """`name`: the root process's own. `where`: as `mesh.metrics` of this host; empty: not
        known yet.
        """
        self._name, self._standing, self._clock = name, standing, clock
        self._where, self._root = where, root
        self._lock = Lock()
        self._kept: tuple[int, str, bytes] = (503, "", b"")
        self._made_s = -KEPT_S

    def page(self) -> tuple[int, str, bytes]:
        with self._lock:
            if self._clock.monotonic() - self._made_s >= KEPT_S:
                self._kept = self._made()
                self._made_s = self._clock.monotonic()
            return self._kept

    def _made(self) -> tuple[int, str, bytes]:
        merged, standing, where = Merged(), self._standing, self._where()
        root = {"service": self._name, "kind": "root", "job": ""}
        gauges = {
            "live": not standing.not_live(),
            "ready": not standing.not_ready(),
            "loop_lag_seconds": standing.watchdog.behind_s,
        }
        merged.add(Exposition(labels=root, counters={}, gauges=gauges).collect())
        processes, ups = standing.processes() if where else [], [(root, True)]
        for process, page in zip(processes, scrape(processes, where), strict=True):
            ups.append((process.labels, _added(merged, page, process.labels)))
        merged.add([_family("up", "1 for a process that answers, or lives by its lease", ups)])
        merged.add(self._of_host())
        if (head := standing.mesh()) is not None:
            merged.add(families(head))
        return merged.rendered()

    def _of_host(self) -> Iterator[Any]:
        answers, head = not self._standing.silent, self._standing.mesh()
        yield _family("redis_up", "1 while Redis answers this host", [({}, answers)])
        runs = [Path(job.run_dir).parent for job in head.mesh.jobs if job.run_dir] if head else []
        disks = list(_disks([self._root, *runs, SHARED_MEMORY]))
        free = [({"path": str(p)}, free) for p, free, _ in disks]
        size = [({"path": str(p)}, size) for p, _, size in disks]
        yield _family("disk_free_bytes", "What may still be written there", free)
        yield _family("disk_size_bytes", "The size of that file system", size)


def _added(merged: Merged, page: str | None, labels: Mapping[str, str]) -> bool:
    """Whether the process is up whose page this is, which is added if it has one."""
    try:
        merged.add_page(page or "", labels)
    except ValueError:
        return False
    return page is not None


def _disks(paths: Iterable[Path]) -> Iterator[tuple[Path, int, int]]:
    """(path, free, size) of each file system, once."""
    seen: set[int] = set()
    for path in paths:
        with suppress(OSError):  # it is not there
            device = os.stat(path).st_dev
            if device not in seen:
                found = os.statvfs(path)
                yield path, storage.free_bytes(path), found.f_blocks * found.f_frsize
                seen.add(device)


def _family(name: str, text: str, rows: Iterable[tuple[dict[str, str], float]]) -> Any:
    from prometheus_client.metrics_core import GaugeMetricFamily

    family = GaugeMetricFamily(f"meshrl_{name}", text)
    for labels, number in rows:
        family.add_sample(family.name, labels, float(number))
    return family


class Merged:
    """One valid exposition of what is added to it."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}  # by the name that its TYPE line has

    def add_page(self, text: str, labels: Mapping[str, str]) -> None:
        """The page of one process, whose `service` and `kind` these are; a sample that names no job
        has that of `labels`. ValueError, and nothing is added: it is no page of metrics.
        """
        from prometheus_client.parser import text_string_to_metric_families

        own = {name: labels.get(name, "") for name in OURS}
        try:
            families = list(text_string_to_metric_families(text))
        except (KeyError, IndexError, AttributeError) as error:  # of its parser, too
            raise ValueError(f"no page of metrics: {error}") from error
        for family in families:
            family.samples = [
                s._replace(labels={**s.labels, **own, "job": s.labels.get("job") or own["job"]})
                for s in family.samples
            ]
            self.add([family])

    def add(self, families: Iterable[Any]) -> None:
        """Families of `prometheus_client`, with the labels that they have."""
        for family in families:
            header = family.name + ("_total" if family.type == "counter" else "")
            known = self._families.setdefault(header, family)
            if known is not family:
                known.samples += family.samples
                if known.type != family.type:  # of two kinds of processes: it is what neither says
                    known.type = "unknown"

    def collect(self) -> Iterable[Any]:
        """The families, as `prometheus_client` asks a collector for them."""
        return self._families.values()

    def rendered(self) -> tuple[int, str, bytes]:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return 200, CONTENT_TYPE_LATEST, generate_latest(self)


def scrape(processes: Sequence[MonitoredProcess], where: str) -> list[str | None]:
    """The page that each process answers with in `ANSWER_S`, empty if it has none; None: it is
    down. `where`: as `mesh.metrics`, of this host. Only it is asked, whatever address a record has.
    """

    async def all_pages() -> list[str | None]:
        return list(await asyncio.gather(*(_one(process, where) for process in processes)))

    return asyncio.run(all_pages())


async def _one(process: MonitoredProcess, where: str) -> str | None:
    if not process.alive or not process.metrics:
        return "" if process.alive else None
    host, family = bare(ports(where, "mesh.metrics")[0])
    if host in ANYWHERE:
        host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    try:
        async with asyncio.timeout(ANSWER_S):
            return await _page(host, urlsplit(process.metrics).port or 0)
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return None


async def _page(host: str, port: int) -> str:
    """ValueError when what answers there is no page."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(GET)
        await writer.drain()
        answer = bytearray()
        while part := await reader.read(1 << 16):
            answer += part
            if len(answer) > MOST_BYTES:
                raise ValueError("it does not end")
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    if head.split(b" ")[1:2] != [b"200"]:
        raise ValueError("it does not answer with a page")
    return body.decode()


SETTING = "--health"


@asynccontextmanager
async def outward(
    root: RootProcess,
    stop: asyncio.Event,
    where: str,
    head: bool,
    *,
    stall_s: float = MeshSettings.stall_s,
    look_s: float = LOOK_S,
) -> AsyncIterator[str]:
    """Answers at `where` (HOST:PORT; empty: nowhere) from before the host starts until it has
    ended; yields its address. `stall_s`: that its loop may stand still; `look_s`: between two looks
    at Redis. ConfigError when the port is taken.
    """
    if not where:
        yield ""
        return
    of_mesh = partial(read_head, place=root.place) if head else None
    standing = Standing(root, stop, of_mesh, stall_s, look_s)

    def metrics() -> str:
        return root.reached[1].metrics if root.reached is not None else ""

    name = "launcher" if head else "hosting"
    pages = {
        "/metrics": HostPage(name, standing, root.clock, metrics, root.place.root).page,
        "/livez": health(standing.not_live),
        "/readyz": health(standing.not_ready),
    }
    endpoint = MetricsEndpoint(where, "", root.host, pages, SETTING)
    tasks = [asyncio.create_task(standing.tick()), asyncio.create_task(standing.look())]
    try:
        yield endpoint.address
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        endpoint.close()
