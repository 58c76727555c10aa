"""CPU time of a mesh, by kind of process."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

NURSERY = "nursery"


class Meter:
    """CPU time of the launcher and all that descends from it, by kind of process."""

    def __init__(self, launcher: int) -> None:
        self.launcher = launcher
        self._known: dict[tuple[int, float], tuple[str, float]] = {}

    def look(self) -> None:
        """Notes what every process has used; what has ended keeps its last reading."""
        for process in self._family():
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    key = (process.pid, process.create_time())
                    kind = self._known[key][0] if key in self._known else NURSERY
                    if kind == NURSERY:  # or what it has just forked
                        kind = kind_of(process)
                self._known[key] = (kind, times.user + times.system)
            except psutil.Error:
                continue

    def _family(self) -> Iterator[psutil.Process]:
        try:
            launcher = psutil.Process(self.launcher)
            yield launcher
            yield from launcher.children(recursive=True)
        except psutil.Error:
            return

    def reading(self, roles: bool) -> dict[str, float]:
        """Seconds by kind; without the role processes if `roles` is False."""
        self.look()
        used: dict[str, float] = {}
        for kind, seconds in self._known.values():
            if roles or kind not in ("engine", "trainer"):
                used[kind] = used.get(kind, 0.0) + seconds
        return used


def kind_of(process: psutil.Process) -> str:
    """engine, trainer, rollout, environment, sandbox, ... by what it runs."""
    line = " ".join(process.cmdline())
    for mark, kind in (
        ("meshrl.common.mesh.process.forking.nursery", NURSERY),
        ("meshrl.services.engine", "engine"),
        ("meshrl.services.trainer", "trainer"),
        ("meshrl.services.environment", "environment"),
        ("environment/verifying/boot.py", "environment"),
        ("meshrl.services.rollout", "rollout"),
        ("meshrl.services.sandbox", "sandbox"),
        ("meshrl.services.planner", "planner"),
        ("meshrl.services.weights", "weights"),
        ("meshrl.services.node", "node"),
        ("redis", "redis"),
        ("valkey", "redis"),
    ):
        if mark in line:
            return kind
    return "launcher"
