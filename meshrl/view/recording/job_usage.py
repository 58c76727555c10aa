"""Usage of a job, summed over all incarnations of its processes and all its sessions.

A process that works for one job counts for that job from its first second. Processes that serve all
jobs of a mesh (Redis, the store, planners, agents, workers, the launcher) are divided equally
between the jobs that run at the time, so that the sum over jobs is the mesh's usage. A process that
dies takes its counters with it, so the last value of each (name, pid, start) is retained. The whole
tally is stored in the run directory, and a resumed run continues it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshrl.common.state.pool.workers.rows import Instance, InstancePhase, Tier
from meshrl.directory.directory_paths import read_json, write_json
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot
from meshrl.view.mesh.process_usage import ProcessCpuTime
from meshrl.view.mesh.slice_lanes import compute_hidden_share

# Fields of a tally that are stored in the run directory.
STORED_FIELDS = (
    *("cpu", "tokens", "shared", "accelerator_s", "wall_s"),
    *("warm_start_cached", "sessions", "prefixes", "slices", "cost"),
)
ADDED_FIELDS = {"slices", "cost"}  # tallies of earlier versions do not have them
HOUR_S = 3600.0
# Stats of a process in time slices, beside `slice_s` by function.
WAIT_STATS = ("turn_wait_s", "slice_switch_s")
MOVED_STATS = ("slice_loaded_bytes", "slice_hidden_bytes")


@dataclass
class JobUsage:
    """Sums by process name; `cpu` and `tokens` map name -> {incarnation: last value}."""

    cpu: dict[str, dict[str, float]] = field(default_factory=dict)  # of the job's own processes
    tokens: dict[str, dict[str, float]] = field(default_factory=dict)
    shared: dict[str, float] = field(default_factory=dict)  # its part of what serves all, CPU-s
    accelerator_s: float = 0.0  # of workers
    cost: float = 0.0  # of these seconds, by the price of an hour of each worker
    wall_s: float = 0.0  # wall time of earlier sessions
    warm_start_cached: bool = False
    sessions: list[list[int]] = field(default_factory=list)  # first and last ms (wall) of each
    prefixes: dict[str, dict[str, float]] = field(default_factory=dict)  # by engine's incarnation
    # by incarnation: seconds of time slices by function, and its switches
    slices: dict[str, dict[str, float]] = field(default_factory=dict)
    _seen: dict[str, float] = field(default_factory=dict)  # of what serves all: key -> CPU-s
    _charged: dict[str, tuple[str, float]] = field(default_factory=dict)  # key -> name, CPU-s
    _turns: dict[str, float] = field(default_factory=dict)  # incarnation -> seconds of slices
    # time of the last snapshot; the job's accelerators then, and the price of their hour
    _has: tuple[float, float, float] | None = None

    @classmethod
    def read(cls, path: Path) -> JobUsage:
        if not path.is_file():
            return cls()
        document = read_json(path)
        known = [name for name in STORED_FIELDS if name in document or name not in ADDED_FIELDS]
        return cls(**{name: document[name] for name in known})

    def write(self, path: Path, wall_s: float) -> None:
        """Write the tally, with the wall time of this session added."""
        content = {name: getattr(self, name) for name in STORED_FIELDS}
        content["wall_s"] += wall_s
        write_json(path, content, durable=False)  # written every other second

    def update_session(self, started_ms: int, now_ms: int) -> None:
        """Extend the session that began at `started_ms` to `now_ms`."""
        if not self.sessions or self.sessions[-1][0] != started_ms:
            self.sessions.append([started_ms, now_ms])
        self.sessions[-1][1] = now_ms

    def update_tokens(self, name: str, incarnation: str, tokens: float) -> None:
        tokens_by_incarnation = self.tokens.setdefault(name, {})
        tokens_by_incarnation[incarnation] = max(
            tokens, tokens_by_incarnation.get(incarnation, 0.0)
        )

    def update_workers(self, mesh: MeshSnapshot, job: str, now_s: float) -> None:
        """Count the job's use of the workers' accelerators since the last snapshot.

        Time-sliced processes report their compute time; others count by the places of their
        instances.
        """
        self.update_slices(mesh, job)
        measured: dict[str, float] = {}
        prices = mesh.prices
        prices_by_instance = {
            r.id: [prices.get(g.workers[rank], 0.0) for rank in r.ranks]
            for g, r in mesh.find_instances(job)
            if r.time_sliced
        }
        for entry in mesh.entries:
            resident = str(entry.stats.get("instance", ""))
            if entry.alive and resident in prices_by_instance and "turn_held_s" in entry.stats:
                measured[resident] = float(entry.stats["turn_held_s"])
                before = self._turns.get(entry.incarnation, 0.0 if self._has else None)
                if before is not None:
                    more = max(0.0, measured[resident] - before)
                    self.accelerator_s += len(prices_by_instance[resident]) * more
                    self.cost += sum(prices_by_instance[resident]) * more / HOUR_S
                self._turns[entry.incarnation] = measured[resident]
        if self._has is not None:
            before_s, previous_count, previous_price = self._has
            self.accelerator_s += previous_count * max(0.0, now_s - before_s)
            self.cost += previous_price * max(0.0, now_s - before_s) / HOUR_S
        self._has = now_s, *count_accelerators(mesh, job, measured)

    def update_slices(self, mesh: MeshSnapshot, job: str) -> None:
        """Retain the last counts of each process in time slices."""
        ranks = {instance.id: len(instance.ranks) for _, instance in mesh.find_instances(job)}
        for entry in mesh.entries:
            stats, count = entry.stats, ranks.get(str(entry.stats.get("instance", "")), 0)
            if count and stats.get("turns"):
                by_function = stats.get("slice_s", {}).items()
                counts = {key: float(stats.get(key, 0.0)) for key in MOVED_STATS}
                counts |= {key: count * float(stats.get(key, 0.0)) for key in WAIT_STATS}
                counts |= {function: count * float(seconds) for function, seconds in by_function}
                self.slices[entry.incarnation] = counts

    def sum_slices(self) -> dict[str, Any]:
        """Return accelerator-seconds of time slices by function, of waits and of switches.

        The result has the hidden share of loaded bytes too. It is empty without time slices.
        """
        sums: dict[str, float] = {}
        for counts in self.slices.values():
            for key, value in counts.items():
                sums[key] = sums.get(key, 0.0) + value
        if not sums:
            return {}
        wait_s, switch_s, loaded, hidden = (sums.pop(key) for key in WAIT_STATS + MOVED_STATS)
        return {
            "by_function_s": {name: round(s, 2) for name, s in sorted(sums.items())},
            "wait_s": round(wait_s, 2),
            "switch_s": round(switch_s, 2),
            "hidden_share": compute_hidden_share(int(loaded), int(hidden)),
        }

    def update_processes(
        self,
        usage: Iterable[ProcessCpuTime],
        owner_jobs: Mapping[str, str],
        job: str,
        job_count: int = 1,
        counts_earlier_use: bool = True,
    ) -> None:
        """Count what processes have used.

        `owner_jobs` maps the names of processes that work for one job to that job; the use of
        others is divided by `job_count`. `counts_earlier_use`: use before the first reading counts,
        as the mesh was started for the job. A process that gets its name after its start takes its
        earlier use along.
        """
        holders = {key: name for name, cpu_by_key in self.cpu.items() for key in cpu_by_key}
        for process in usage:
            key, name = process.key, process.name
            owner = owner_jobs.get(name, "")
            if owner:
                self._refund(key)
            if owner == job != "":
                before = self.cpu.get(holders.get(key, name), {}).pop(key, 0.0)
                self.cpu.setdefault(name, {})[key] = max(process.cpu_s, before)
            elif not owner:
                before = self._seen.get(key, 0.0 if counts_earlier_use else process.cpu_s)
                self._charge(key, name, max(0.0, process.cpu_s - before) / max(1, job_count))
                self._seen[key] = max(process.cpu_s, before)

    def _charge(self, key: str, name: str, seconds: float) -> None:
        before, charged_s = self._charged.get(key, (name, 0.0))
        if before != name:
            self._refund(key)
            seconds += charged_s
            charged_s = 0.0
        self._charged[key] = name, charged_s + seconds
        self.shared[name] = self.shared.get(name, 0.0) + seconds

    def _refund(self, key: str) -> None:
        """Refund a process that was counted as shared and belongs to one job."""
        name, charged_s = self._charged.pop(key, ("", 0.0))
        if charged_s:
            self.shared[name] -= charged_s

    def sum_cpu_by_name(self) -> dict[str, float]:
        """Return CPU-seconds of the job's processes and its part of shared ones, by name."""
        own = {name: sum(cpu_by_key.values()) for name, cpu_by_key in self.cpu.items()}
        both = own | {n: own.get(n, 0.0) + s for n, s in self.shared.items()}
        return {name: round(seconds, 2) for name, seconds in sorted(both.items())}

    @property
    def shared_s(self) -> float:
        """CPU-seconds of this job's part of the processes that serve all jobs."""
        return sum(self.shared.values())

    def sum_tokens(self, prefix: str) -> int:
        sums = (sum(s.values()) for name, s in self.tokens.items() if name.startswith(prefix))
        return int(sum(sums))


def sum_live_slices(mesh: MeshSnapshot) -> dict[str, dict[str, Any]]:
    """Return the time slices of live processes by job, as `JobUsage.sum_slices` does."""
    found = {}
    for row in mesh.live_jobs:
        usage = JobUsage()
        usage.update_slices(mesh, row.id)
        if slices := usage.sum_slices():
            found[row.id] = slices
    return found


def is_on_accelerator(instance: Instance, rank: int) -> bool:
    """Return True if an instance's tensors are on the accelerator of a rank, or moving there."""
    report = instance.reports.get(rank)
    if report is None or report.generation != instance.generation:
        return False
    return report.tier == Tier.ACCELERATOR and report.phase not in (
        InstancePhase.GONE,
        InstancePhase.FAILED,
    )


def count_accelerators(
    mesh: MeshSnapshot, job: str, measured: Collection[str] = ()
) -> tuple[float, float]:
    """Return the number of accelerators that a job has now, and the price of their hour.

    One that several instances share is divided equally. Time-sliced instances with reported times
    are `measured`, and not counted here.
    """
    count, hourly_price, prices = 0.0, 0.0, mesh.prices
    for gang in mesh.gangs:
        for rank, worker in enumerate(gang.workers):
            instances = [
                r for r in gang.instances if rank in r.ranks and is_on_accelerator(r, rank)
            ]
            counted = [r for r in instances if r.job == job and r.id not in measured]
            share = len(counted) / max(1, len(instances))
            count, hourly_price = count + share, hourly_price + share * prices.get(worker, 0.0)
    return count, hourly_price
