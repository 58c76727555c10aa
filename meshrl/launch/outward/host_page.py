"""The page of metrics of a host: all its processes, the host itself, and at the head the mesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from common.base.clock import Clock
from common.mesh.telemetry.exposition import Exposition
from meshrl.launch.outward.merging import Merged
from meshrl.launch.outward.scraping import Scraped, scrape
from meshrl.launch.outward.standing import Standing
from meshrl.view import storage
from meshrl.view.metrics.mesh_gauges import families

KEPT_S = 1.0  # several monitors, and one that asks in haste, cost the processes one answer
SHARED_MEMORY = Path("/dev/shm")


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
        """HTTP status, content type and body."""
        with self._lock:
            if self._clock.monotonic() - self._made_s >= KEPT_S:
                self._kept = self._made()
                self._made_s = self._clock.monotonic()
            return self._kept

    def _made(self) -> tuple[int, str, bytes]:
        merged = Merged()
        merged.add(self._of_root().collect())
        where = self._where()
        scraped = scrape(self._standing.processes(), where) if where else []
        ups = [({"service": self._name, "kind": "root", "job": ""}, True)]
        for one in scraped:
            ups.append((one.process.labels, one.up and _added(merged, one)))
        merged.add([_family("up", "1 for a process that answers, or lives by its lease", ups)])
        merged.add(self._of_host())
        head = self._standing.mesh()
        if head is not None:
            merged.add(families(head))
        return merged.rendered()

    def _of_root(self) -> Exposition:
        live, ready = not self._standing.not_live(), not self._standing.not_ready()
        lag_s = self._standing.watchdog.behind_s
        return Exposition(
            labels={"service": self._name, "kind": "root", "job": ""},
            counters={},
            gauges={"live": live, "ready": ready, "loop_lag_seconds": lag_s},
        )

    def _of_host(self) -> Iterator[Any]:
        answers = not self._standing.silent
        yield _family("redis_up", "1 while Redis answers this host", [({}, answers)])
        disks = list(_disks([self._root, *self._run_dirs(), SHARED_MEMORY]))
        free = [({"path": str(p)}, free) for p, free, _ in disks]
        size = [({"path": str(p)}, size) for p, _, size in disks]
        yield _family("disk_free_bytes", "What may still be written there", free)
        yield _family("disk_size_bytes", "The size of that file system", size)

    def _run_dirs(self) -> list[Path]:
        head = self._standing.mesh()
        return [Path(job.run_dir).parent for job in head.mesh.jobs if job.run_dir] if head else []


def _added(merged: Merged, one: Scraped) -> bool:
    if one.page:
        try:
            merged.add_page(one.page, one.process.labels)
        except ValueError:
            return False
    return True


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
