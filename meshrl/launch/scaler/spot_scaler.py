"""Loop of the head that brings the number of spot hosts to the planner's plan.

The plan comes from Redis, where a joined host's planner writes too. So the launcher takes numbers
and names only within its own settings and records. Hosts that are given back drain first: the
provider learns of them once they are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import (
    CorruptData,
    DeadlineExceeded,
    MeshError,
    StateUnavailable,
)
from meshrl.common.state import events
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.store.spot_scaling import (
    FAILED_EVENT,
    RELEASED,
    SCALED_EVENT,
    ScalerReport,
    ScalingPlan,
    decode_scaling_plan,
    write_scaler_report,
)
from meshrl.common.state.pool.workers.settings import ScalerSettings
from meshrl.common.state.redis.client import StateClient, read_server_time_ms
from meshrl.directory.directory_paths import MeshPaths, read_json, write_json
from meshrl.directory.joined_hosts import read_joined_hosts
from meshrl.launch.scaler.providers import (
    CommandProvider,
    KubernetesProvider,
    Provider,
    ScaleRequest,
    find_api_address,
)

POLL_S = 1.0
RETRY_S, MAX_RETRY_S = 2.0, 300.0  # after a failed request; doubles with each failure
# The same request is repeated while there are more or fewer hosts, for instance lost ones.
REPEAT_S, MAX_REPEAT_S = 60.0, 600.0
REQUEST_FILE = "scaler.json"  # in the mesh's directory: the number of the last request


@dataclass(slots=True)
class RetryTimer:
    """Time of the next try; the pause doubles with each one until a reset."""

    first_s: float
    most_s: float
    tries: int = 0
    next_s: float = field(default=0.0)  # by a monotonic clock

    def delay(self, now_s: float) -> float:
        """Begin the next pause and return its length in seconds."""
        pause_s = min(self.most_s, self.first_s * 2.0 ** min(self.tries, 30))
        self.tries += 1
        self.next_s = now_s + pause_s
        return pause_s

    def reset(self) -> None:
        self.tries, self.next_s = 0, 0.0


def make_provider(settings: ScalerSettings, mesh_paths: MeshPaths) -> Provider:
    """Return the provider that the settings name."""
    if settings.kubernetes:
        return KubernetesProvider(settings.kubernetes, find_api_address(), settings.timeout_s)
    return CommandProvider(settings.command, settings.timeout_s, mesh_paths.log_path("scaler"))


async def create_scaler(
    state: StateClient, clock: Clock, settings: ScalerSettings, mesh_paths: MeshPaths
) -> SpotScaler | None:
    """Return the scaler of a mesh; without one, end what an earlier scaler has left in Redis."""
    if not settings.is_on:
        await write_scaler_report(state, None)
        await end_releases(state)
        return None
    provider = make_provider(settings, mesh_paths)

    def read_members() -> dict[str, str]:
        return {name: row.address for name, row in read_joined_hosts(mesh_paths).items()}

    return SpotScaler(state, clock, settings, provider, mesh_paths.directory, read_members)


class SpotScaler:
    """Scaler of one mesh. `read_members`: returns the joined hosts with their addresses."""

    def __init__(
        self,
        state: StateClient,
        clock: Clock,
        settings: ScalerSettings,
        provider: Provider,
        directory: Path,
        read_members: Callable[[], Mapping[str, str]],
    ) -> None:
        self._state, self._clock, self._settings = state, clock, settings
        self._provider, self._read_members = provider, read_members
        self._file = directory / REQUEST_FILE
        self._requested = _read_request(self._file)
        self._released: frozenset[str] = frozenset()  # named in a request that succeeded
        self._retry = RetryTimer(RETRY_S, MAX_RETRY_S)
        self._repeat = RetryTimer(REPEAT_S, MAX_REPEAT_S, next_s=clock.monotonic() + REPEAT_S)
        self._error, self._retry_at_s = "", 0.0
        self._report: ScalerReport | None = None

    async def run(self) -> None:
        """Follow the plan. Never returns."""
        while True:
            try:
                await self.poll_once()
            except (StateUnavailable, DeadlineExceeded):
                self._report = None  # written again
            except MeshError as error:  # its own file, or the disk
                print(f"the scaler of spot hosts failed, again: {error}", flush=True)
            await self._clock.sleep(POLL_S)

    async def poll_once(self) -> None:
        """Read the plan, drain what it gives back, and send a request if one is due."""
        plan = decode_scaling_plan(await pool.read_planner_memory(self._state))
        if plan is None:
            return
        members = self._read_members()
        release = [host for host in plan.release if host in members]
        most = max(self._settings.most_hosts, self._requested)
        hosts = min(max(plan.hosts, 0), most)
        if self._settings.dry_run:
            await end_releases(self._state)
            await self._publish(plan, hosts, release)
            return
        empty = await self._drain(release)
        hosts = max(hosts, min(self._requested, hosts + len(release) - len(empty)))
        if hosts < self._requested and not await self._is_settled(plan):
            hosts, empty = self._requested, []
        if self._is_due(plan, hosts, empty):
            await self._send(hosts, {host: members[host] for host in empty})
        await self._publish(plan, hosts, release)

    async def _drain(self, release: Collection[str]) -> list[str]:
        """Drain exactly these hosts, and return those that are empty."""
        reasons = await end_releases(self._state, release)
        empty = []
        for host in release:
            if host not in reasons:
                await pool.set_drain_reason(self._state, host, RELEASED, expected="")
            elif reasons[host] == RELEASED and (
                host in self._released or not await pool.list_remaining(self._state, host)
            ):
                empty.append(host)
        return empty

    async def _is_settled(self, plan: ScalingPlan) -> bool:
        """Return True unless the planner has lost its memory lately: hosts may only be away."""
        age_ms = await read_server_time_ms(self._state) - plan.since_ms
        return age_ms >= 1000 * self._settings.release_after_s

    def _is_due(self, plan: ScalingPlan, hosts: int, empty: Collection[str]) -> bool:
        now_s = self._clock.monotonic()
        if now_s < self._retry.next_s:
            return False
        if self._retry.tries or hosts != self._requested or not self._released.issuperset(empty):
            return True
        if plan.present == hosts:
            self._repeat.tries = 0  # a host that is lost later is requested at once
            return False
        return now_s >= self._repeat.next_s

    async def _send(self, hosts: int, release: Mapping[str, str]) -> None:
        request = ScaleRequest(hosts, hosts * self._settings.workers_per_host, release)
        details = {"hosts": hosts, "workers": request.workers, "release": list(release)}
        if hosts > self._requested:  # before the request: a lost answer must not hide a host
            self._write_request(hosts)
        try:
            await self._provider.scale(request)
        except MeshError as error:
            pause_s = self._retry.delay(self._clock.monotonic())
            self._error, self._retry_at_s = str(error), self._clock.wall() + pause_s
            print(f"scaling to {hosts} spot hosts failed: {error}", flush=True)
            failed = details | {"error": str(error), "retry_s": pause_s}
            await events.append(self._state, FAILED_EVENT, failed)
            return
        self._write_request(hosts)
        self._released = frozenset(release)
        self._retry.reset()
        self._repeat.delay(self._clock.monotonic())
        self._error = ""
        await events.append(self._state, SCALED_EVENT, details)

    def _write_request(self, hosts: int) -> None:
        if hosts != self._requested:
            self._requested = hosts
            write_json(self._file, {"hosts": hosts})

    async def _publish(self, plan: ScalingPlan, hosts: int, release: Collection[str]) -> None:
        report = ScalerReport(
            hosts=hosts,
            present=plan.present,
            release=tuple(release),
            reason=plan.reason,
            dry_run=self._settings.dry_run,
            error=self._error,
            failures=self._retry.tries,
            retry_ms=int(1000 * self._retry_at_s) if self._error else 0,
        )
        if report == self._report:
            return
        await write_scaler_report(self._state, report)
        known = self._report
        self._report = report
        if report.dry_run and (
            known is None or (known.hosts, known.release) != (report.hosts, report.release)
        ):
            details = {"hosts": hosts, "release": list(release), "dry_run": True}
            await events.append(self._state, SCALED_EVENT, details)


async def end_releases(state: StateClient, keep: Collection[str] = ()) -> dict[str, str]:
    """Use hosts again that drain to be given back, without those of `keep`.

    Returns the hosts that drain now, each with the reason.
    """
    reasons = await pool.read_drain_reasons(state)
    for host, reason in list(reasons.items()):
        if reason == RELEASED and host not in keep:
            await pool.set_drain_reason(state, host, "", expected=RELEASED)
            del reasons[host]
    return reasons


def _read_request(path: Path) -> int:
    """Return the number of hosts of the last request; 0 before the first one."""
    try:
        return int(read_json(path)["hosts"])
    except (FileNotFoundError, CorruptData, KeyError, ValueError):
        return 0
