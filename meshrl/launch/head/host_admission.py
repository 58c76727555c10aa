"""Admission and removal of hosts, by the launcher, on requests of the gateway or a user.

The mesh's directory records the hosts, with the prefixes that their workers' names have had: no
prefix is assigned twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from meshrl.common.api.calls.call_permissions import HOST_ROLES, PLANNER_ROLE
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import (
    DeadlineExceeded,
    MeshError,
    NotFound,
    Refused,
    StateUnavailable,
)
from meshrl.common.mesh.access import members
from meshrl.common.mesh.access.access_records import RECORDS_FILE
from meshrl.common.mesh.access.admitted_hosts import AdmittedHost
from meshrl.common.state import events, registry
from meshrl.common.state.hosts import host_requests
from meshrl.common.state.hosts.host_requests import HostRequest
from meshrl.common.state.pool.scheduling.snapshot import HOST_LEFT, SHUTDOWN_NOTICE
from meshrl.common.state.pool.store import host_notices
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.store.host_notices import HostNotice
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.directory_paths import MeshPaths
from meshrl.directory.joined_hosts import JoinedHost, JoinedHosts

POLL_S = 0.2
AWAY_CHECK_S = 5.0  # between two checks for absent hosts
TOKEN_FILE_TIMEOUT_S = 10.0
STANDBY_PLANNER = "planner/2"  # beside the two of the head


class HostAccess(Protocol):
    async def admit_host(self, host: AdmittedHost) -> None:
        """Admit the host from now on."""

    async def expel_host(self, host: str) -> bool:
        """Expel the host and its processes; return whether it was admitted."""


class AbsenceTracker:
    """Tracker of absent hosts. A host is absent from the first poll that does not find it;
    `limit_s` is the longest absence.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._away_since_s: dict[str, float] = {}

    def find_absent(
        self, hosts: Collection[str], present: Collection[str], now_s: float
    ) -> dict[str, float]:
        """Return the hosts that have been absent beyond the limit, with the seconds of their
        absence.

        `present`: hosts that are found now; `now_s`: time of a monotonic clock.
        """
        away = set(hosts) - set(present)
        self._away_since_s = {host: self._away_since_s.get(host, now_s) for host in away}
        return {
            h: now_s - s for h, s in sorted(self._away_since_s.items()) if now_s - s > self._limit_s
        }

    def reset(self) -> None:
        """Forget earlier absences, as no host could be found for a while."""
        self._away_since_s = {}


class HostAdmission:
    """Admission of hosts by the head named `head_host`.

    `describe_mesh`: returns fields that every host receives beside its own (see
    `meshrl.common.api.gateway.HostAdmitted`). `away_limit_s`: an ephemeral host that is absent for
    longer is removed.
    """

    def __init__(
        self,
        mesh_paths: MeshPaths,
        state: StateClient,
        clock: Clock,
        host_access: HostAccess,
        describe_mesh: Callable[[], Mapping[str, Any]],
        away_limit_s: float,
        head_host: str,
    ) -> None:
        self._head_host = head_host
        self._mesh_paths, self._state, self._clock, self._host_access = (
            mesh_paths,
            state,
            clock,
            host_access,
        )
        self._describe_mesh = describe_mesh
        self._joined_hosts = JoinedHosts.read(mesh_paths)
        self._absences, self._away_limit_s = AbsenceTracker(away_limit_s), away_limit_s
        self._leaving: dict[str, float] = {}  # hosts that are being removed -> seconds of absence

    async def run(self) -> None:
        """Answer host requests and remove absent hosts. Never returns."""
        look_at = 0.0
        while True:
            try:
                for request in await host_requests.read_pending_requests(self._state):
                    await host_requests.answer_host_request(
                        self._state, request.id, await self._answer_request(request)
                    )
                if self._clock.monotonic() >= look_at:
                    await self._remove_absent_hosts()
                    look_at = self._clock.monotonic() + min(AWAY_CHECK_S, self._away_limit_s / 4)
            except (StateUnavailable, DeadlineExceeded):
                self._absences.reset()
            await self._clock.sleep(POLL_S)

    async def _remove_absent_hosts(self) -> None:
        """Remove ephemeral hosts that were absent too long. One that returns at this moment learns
        that its membership has ended.
        """
        ephemeral = [host for host, row in self._joined_hosts.hosts.items() if row.ephemeral]
        if not ephemeral and not self._leaving:
            return
        nodes = await registry.lookup_all(self._state, [f"node/{host}" for host in ephemeral])
        here = [entry.host for entry in nodes.values() if entry.alive]
        self._leaving |= self._absences.find_absent(ephemeral, here, self._clock.monotonic())
        for host, away_s in list(self._leaving.items()):
            try:
                await self._remove_host(host, away_s)
                del self._leaving[host]
            except (StateUnavailable, DeadlineExceeded):
                raise
            except (
                MeshError,
                OSError,
            ) as error:  # a full disk, or its own file: the next check retries
                print(f"removing {host}, which is absent, failed: {error}", flush=True)

    async def _answer_request(self, request: HostRequest) -> Mapping[str, Any] | MeshError:
        try:
            if request.kind == host_requests.JOIN:
                return await self._admit(request.arguments)
            if request.kind == host_requests.LEAVE:
                return {"left": await self._remove_host(str(request.arguments["host"]))}
            if request.kind in (host_requests.DRAIN, host_requests.NOTICE):
                return {"changed": await self._record_notice(request.arguments)}
            if request.kind == host_requests.RETURN:
                return {"changed": await self._mark_returned(request.arguments)}
            if request.kind == host_requests.LOCATE:
                self._find_joined_host(request.arguments)
                return self._describe_mesh()
            return Refused(f"the launcher received an unknown request, {request.kind!r:.40}")
        except (StateUnavailable, DeadlineExceeded):
            raise
        except MeshError as error:
            return error
        except (KeyError, TypeError, ValueError) as error:
            return Refused(f"the launcher received an invalid request: {error!r}")
        except OSError as error:
            return MeshError(
                f"the launcher's request failed: {error}", where=str(self._mesh_paths.directory)
            )

    async def _admit(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        admitted, key = AdmittedHost(**arguments["admitted"]), str(arguments["key"])
        if admitted.host == self._head_host:
            raise Refused(
                f"{self._head_host} is the head of the mesh", fix="Join from a new directory"
            )
        known = self._joined_hosts.hosts.get(admitted.host)
        if known is not None and known.key_digest == key:  # a repeat: the answer was lost
            await self._host_access.expel_host(known.host)
            joined = known
        elif known is not None or admitted.host in self._joined_hosts.departed_hosts:
            raise Refused(
                f"a host named {admitted.host} is or was in the mesh",
                fix="Join from a new directory",
            )
        else:
            joined = self._record_host(admitted.host, arguments, key)
        roles = HOST_ROLES | ({PLANNER_ROLE} if joined.planner_name else set())
        passwords = {role: admitted.passwords[role] for role in roles}
        await self._host_access.admit_host(replace(admitted, passwords=passwords))
        await events.append(
            self._state, "host_admitted", {"host": joined.host, "address": joined.address}
        )
        print(f"{joined.host} at {joined.address} has joined", flush=True)
        return {
            "worker_prefix": joined.worker_prefix,
            "planner": joined.planner_name,
            **self._describe_mesh(),
        }

    def _find_joined_host(self, arguments: Mapping[str, Any]) -> JoinedHost:
        """Return the row of the requesting host.

        Raises NotFound: the gateway has its key from an attempt to join that has not succeeded.
        """
        host = str(arguments["host"])
        if host not in self._joined_hosts.hosts:
            raise NotFound(f"{host} was not admitted to the mesh", fix="Run `meshrl join` on it")
        return self._joined_hosts.hosts[host]

    def _record_host(self, host: str, arguments: Mapping[str, Any], key: str) -> JoinedHost:
        standby = bool(arguments["standby"]) and not any(
            h.planner_name for h in self._joined_hosts.hosts.values()
        )
        count = self._joined_hosts.joined_count + 1
        joined = JoinedHost(
            host,
            str(arguments["address"]),
            f"h{count}w",
            STANDBY_PLANNER if standby else "",
            int(arguments["workers"]),
            time.time(),
            key,
            bool(arguments["ephemeral"]),
        )
        hosts = {**self._joined_hosts.hosts, host: joined}
        self._write_hosts(replace(self._joined_hosts, joined_count=count, hosts=hosts))
        return joined

    async def _remove_host(self, host: str, away_s: float = 0.0) -> bool:
        """Remove a host, and return whether it was a member. A repeat after a failure finishes the
        removal.
        """
        was = host in self._joined_hosts.hosts
        if not was and host not in self._joined_hosts.departed_hosts:
            raise NotFound(
                f"the mesh has no host {host}", fix="Run `meshrl hosts` to list its hosts"
            )
        if was:
            await self._host_access.expel_host(host)
            # Next, so that it is out for good whatever fails from here on.
            hosts = {name: row for name, row in self._joined_hosts.hosts.items() if name != host}
            self._write_hosts(
                replace(
                    self._joined_hosts,
                    hosts=hosts,
                    departed_hosts=(*self._joined_hosts.departed_hosts, host),
                )
            )
            why = f": it is ephemeral and was absent for {away_s:.0f} s" if away_s else ""
            print(f"{host} has left{why}", flush=True)
        await pool.set_drain_reason(self._state, host, HOST_LEFT)
        await host_notices.write_notice(self._state, host, HostNotice())
        remove = partial(members.remove_member, self._mesh_paths.directory / RECORDS_FILE, host)
        async with self._clock.timeout(TOKEN_FILE_TIMEOUT_S, "updating the token file"):
            await asyncio.to_thread(remove)  # blocks while another command holds the lock
        if was:
            await events.append(
                self._state, "host_left", {"host": host, "away_s": round(away_s, 1)}
            )
        return was

    async def _record_notice(self, arguments: Mapping[str, Any]) -> bool:
        """Record what a host knows about its end; return True if the host drains from now on."""
        host = self._find_joined_host(arguments).host
        announced = {"source": "its stop order", "preempt_at_s": host_notices.UNKNOWN_TIME}
        notice = host_notices.decode_notice(arguments.get("notice", announced))
        if not notice.source:
            notice = replace(notice, preempt_at_s=None)
        await host_notices.write_notice(self._state, host, notice)
        return bool(notice.source) and await pool.set_drain_reason(
            self._state, host, SHUTDOWN_NOTICE, expected=""
        )

    async def _mark_returned(self, arguments: Mapping[str, Any]) -> bool:
        """Return True if the host may be used again, because its own end was what excluded it."""
        known, address = self._find_joined_host(arguments), str(arguments["address"])
        host = known.host
        if known.address != address:
            hosts = {**self._joined_hosts.hosts, host: replace(known, address=address)}
            self._write_hosts(replace(self._joined_hosts, hosts=hosts))
            print(f"{host} has the new address {address}", flush=True)
        await host_notices.write_notice(self._state, host, HostNotice())
        return await pool.set_drain_reason(self._state, host, "", expected=SHUTDOWN_NOTICE)

    def _write_hosts(self, joined_hosts: JoinedHosts) -> None:
        joined_hosts.write(self._mesh_paths)
        self._joined_hosts = joined_hosts
