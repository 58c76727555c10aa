"""Lets hosts into a mesh and out of it: the launcher does, as the gateway or a person asks.

Which hosts there are is on record in the mesh's directory, with the prefixes that their workers'
names have had: none is given twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from meshrl.common.api.calls.callers import HOST_ROLES, PLANNER
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import (
    DeadlineExceeded,
    MeshError,
    NotFound,
    Refused,
    StateUnavailable,
)
from meshrl.common.mesh.access import members
from meshrl.common.mesh.access.hosts import AdmittedHost
from meshrl.common.mesh.access.records import FILE
from meshrl.common.state import events, registry
from meshrl.common.state.hosts import admission
from meshrl.common.state.hosts.admission import AdmissionRequest
from meshrl.common.state.pool.placing.snapshot import LEFT, NOTICE
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.redis.client import State
from meshrl.directory.joined import HostBook, JoinedHost
from meshrl.directory.places import MeshPlace

LOOK_S = 0.2
AWAY_LOOK_S = 5.0  # between two looks who is away
FILE_S = 10.0
STANDBY = "planner/2"  # beside the two of the head


class Doors(Protocol):
    async def admit_host(self, host: AdmittedHost) -> None:
        """From now on."""

    async def expel_host(self, host: str) -> bool:
        """No more, also those that are in; whether it was let in."""


class Absences:
    """A host is away from the first look on that does not find it; `for_s` is what is long."""

    def __init__(self, for_s: float) -> None:
        self._for_s = for_s
        self._since: dict[str, float] = {}

    def look(self, hosts: Collection[str], here: Collection[str], now: float) -> dict[str, float]:
        """Those of these hosts that have been away for long, and for how long, in seconds; `here`
        are those that are found, `now` is of a monotonic clock.
        """
        away = set(hosts) - set(here)
        self._since = {host: self._since.get(host, now) for host in away}
        return {h: now - s for h, s in sorted(self._since.items()) if now - s > self._for_s}

    def begin_anew(self) -> None:
        """Nobody could be found for a while: what was seen before tells nothing."""
        self._since = {}


class Admitting:
    """`head`: the name of this host, which no other has; `about`: what hosts are told beside what
    is their own (see `meshrl.common.api.gateway.HostAdmitted`); `gone_s`: an ephemeral one that has
    been away for longer is let out.
    """

    def __init__(
        self,
        place: MeshPlace,
        state: State,
        clock: Clock,
        doors: Doors,
        about: Callable[[], Mapping[str, Any]],
        gone_s: float,
        head: str,
    ) -> None:
        self._head = head
        self._place, self._state, self._clock, self._doors = place, state, clock, doors
        self._about = about
        self._book = HostBook.of(place)
        self._absences, self._gone_s = Absences(gone_s), gone_s
        self._going: dict[str, float] = {}  # hosts that are being let out, away for so many seconds

    async def run(self) -> None:
        """Answers what is asked, and lets out who stays away, for ever."""
        look_at = 0.0
        while True:
            try:
                for asked in await admission.asked(self._state):
                    await admission.answer(self._state, asked.id, await self._answer(asked))
                if self._clock.monotonic() >= look_at:
                    await self._let_go()
                    look_at = self._clock.monotonic() + min(AWAY_LOOK_S, self._gone_s / 4)
            except (StateUnavailable, DeadlineExceeded):
                self._absences.begin_anew()
            await self._clock.sleep(LOOK_S)

    async def _let_go(self) -> None:
        """Lets ephemeral hosts out that have been away for long: one that comes back at this moment
        is told that it is a member no more.
        """
        ephemeral = [host for host, row in self._book.hosts.items() if row.ephemeral]
        if not ephemeral and not self._going:
            return
        nodes = await registry.lookup_all(self._state, [f"node/{host}" for host in ephemeral])
        here = [entry.host for entry in nodes.values() if entry.alive]
        self._going |= self._absences.look(ephemeral, here, self._clock.monotonic())
        for host, away_s in list(self._going.items()):
            try:
                await self._let_out(host, away_s)
                del self._going[host]
            except (StateUnavailable, DeadlineExceeded):
                raise
            except (MeshError, OSError) as error:  # a full disk, or its own file: at the next look
                print(f"{host}, which is away, cannot be let out: {error}", flush=True)

    async def _answer(self, asked: AdmissionRequest) -> Mapping[str, Any] | MeshError:
        try:
            if asked.kind == admission.JOIN:
                return await self._let_in(asked.about)
            if asked.kind == admission.LEAVE:
                return {"left": await self._let_out(str(asked.about["host"]))}
            if asked.kind == admission.DRAIN:
                host = self._let_in_before(asked.about).host
                return {"changed": await pool.mark_host(self._state, host, NOTICE, was="")}
            if asked.kind == admission.BACK:
                return {"changed": await self._back(asked.about)}
            if asked.kind == admission.WHERE:
                self._let_in_before(asked.about)
                return self._about()
            return Refused(f"the launcher does not know what {asked.kind!r:.40} is")
        except (StateUnavailable, DeadlineExceeded):
            raise
        except MeshError as error:
            return error
        except (KeyError, TypeError, ValueError) as error:
            return Refused(f"the launcher cannot read what was asked: {error!r}")
        except OSError as error:
            return MeshError(
                f"the launcher cannot do that: {error}", where=str(self._place.directory)
            )

    async def _let_in(self, about: Mapping[str, Any]) -> Mapping[str, Any]:
        admitted, key = AdmittedHost(**about["admitted"]), str(about["key"])
        if admitted.host == self._head:
            raise Refused(f"{self._head} is the head of the mesh", fix="Join from a new directory")
        known = self._book.hosts.get(admitted.host)
        if known is not None and known.key == key:  # its answer was lost
            await self._doors.expel_host(known.host)
            joined = known
        elif known is not None or admitted.host in self._book.left:
            raise Refused(
                f"a host called {admitted.host} is in the mesh, or was",
                fix="Join from a new directory",
            )
        else:
            joined = self._entered(admitted.host, about, key)
        roles = HOST_ROLES | ({PLANNER} if joined.planner else set())
        passwords = {role: admitted.passwords[role] for role in roles}
        await self._doors.admit_host(replace(admitted, passwords=passwords))
        await events.append(
            self._state, "host_admitted", {"host": joined.host, "address": joined.address}
        )
        print(f"{joined.host} at {joined.address} has joined", flush=True)
        return {"prefix": joined.prefix, "planner": joined.planner, **self._about()}

    def _let_in_before(self, about: Mapping[str, Any]) -> JoinedHost:
        """The row of the host that asks. NotFound: the gateway has its key, from a try to join that
        came to nothing so far.
        """
        host = str(about["host"])
        if host not in self._book.hosts:
            raise NotFound(f"{host} was not let into the mesh", fix="`meshrl join` does that")
        return self._book.hosts[host]

    def _entered(self, host: str, about: Mapping[str, Any], key: str) -> JoinedHost:
        standby = bool(about["standby"]) and not any(h.planner for h in self._book.hosts.values())
        count = self._book.count + 1
        joined = JoinedHost(
            host,
            str(about["address"]),
            f"h{count}w",
            STANDBY if standby else "",
            int(about["workers"]),
            time.time(),
            key,
            bool(about["ephemeral"]),
        )
        hosts = {**self._book.hosts, host: joined}
        self._keep(replace(self._book, count=count, hosts=hosts))
        return joined

    async def _let_out(self, host: str, away_s: float = 0.0) -> bool:
        """Whether it was in. Asked again after a failure it does what was left undone."""
        was = host in self._book.hosts
        if not was and host not in self._book.left:
            raise NotFound(f"no host is called {host}", fix="`meshrl hosts` shows them")
        if was:
            await self._doors.expel_host(host)
            # Next, so that it is out for good whatever fails from here on.
            hosts = {name: row for name, row in self._book.hosts.items() if name != host}
            self._keep(replace(self._book, hosts=hosts, left=(*self._book.left, host)))
            why = f": it is ephemeral, and was away for {away_s:.0f} s" if away_s else ""
            print(f"{host} has left{why}", flush=True)
        await pool.mark_host(self._state, host, LEFT)
        forget = partial(members.forget, self._place.directory / FILE, host)
        async with self._clock.timeout(FILE_S, "the file of tokens"):
            await asyncio.to_thread(forget)  # another command may have it locked
        if was:
            await events.append(
                self._state, "host_left", {"host": host, "away_s": round(away_s, 1)}
            )
        return was

    async def _back(self, about: Mapping[str, Any]) -> bool:
        """Whether it may be used again from now on, as what kept it from that was its own end."""
        known, address = self._let_in_before(about), str(about["address"])
        host = known.host
        if known.address != address:
            hosts = {**self._book.hosts, host: replace(known, address=address)}
            self._keep(replace(self._book, hosts=hosts))
            print(f"{host} is at {address} now", flush=True)
        return await pool.mark_host(self._state, host, "", was=NOTICE)

    def _keep(self, book: HostBook) -> None:
        book.write(self._place)
        self._book = book
