"""Host membership at the gateway. A host joins with a token and its own key, and is then identified
by the key as a member. It can leave, and query its membership.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshrl.common.api.calls.call_permissions import HOST_ROLES, PLANNER_ROLE
from meshrl.common.api.gateway import (
    Gateway,
    HostAdmitted,
    JoinHost,
    NoticeReport,
    RedisLocation,
    RemainingNames,
)
from meshrl.common.base.errors import NotFound, Refused
from meshrl.common.base.host.settings import SECRET_BYTES
from meshrl.common.base.release import read_release
from meshrl.common.mesh.access import members
from meshrl.common.mesh.access.access_records import RECORDS_FILE, digest_key
from meshrl.common.mesh.access.admitted_hosts import AdmittedHost
from meshrl.common.mesh.access.members import REJOIN_WINDOW_S
from meshrl.common.mesh.access.token_registry import TokenRegistry
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.hosts import host_requests
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.store.pool_rows import list_remaining
from meshrl.services.gateway.listener import caller_id

FILE_TIMEOUT_S = 10.0  # for a change of the tokens
HOST_NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]{2,40}")
KEY_PATTERN = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # in Z85
ADDRESS_PATTERN = re.compile(r"[0-9A-Za-z.:\[\]_-]{1,255}")


@dataclass(frozen=True)
class JoinInProgress:
    """Admission of a host in progress, or a recent one."""

    token: str
    request: JoinHost
    answer: asyncio.Task[HostAdmitted]
    since_s: float


class HostCalls(Actor):
    """Host methods of the gateway; each call contains the host's member key, or a token to join."""

    def __init__(self, mesh: Mesh, tokens: TokenRegistry) -> None:
        self.mesh, self._tokens = mesh, tokens
        # By the host's own key: a host whose answer was lost repeats the request, and must receive
        # the same secret.
        self._joins: dict[str, JoinInProgress] = {}

    @call(Gateway.join)
    async def join(self, request: JoinHost) -> HostAdmitted:
        """Admit a host. Raise Refused with the reason of a rejection."""
        token = caller_id.get()
        if (member := self._tokens.find_member(token)) is not None:
            raise Refused(
                f"{member.host} is already a member", fix="Join as another host with a token"
            )
        self._check_request(request)
        now_s = self.mesh.clock.wall()
        self._joins = {k: j for k, j in self._joins.items() if now_s - j.since_s <= REJOIN_WINDOW_S}
        found = self._joins.get(request.key)
        if (
            found is not None
            and found.answer.done()
            and not self._tokens.find_holder(_encode_public_key(request))
        ):
            found = None  # it has left since
        if found is None or (found.token, found.request) != (token, request):
            letting_in = self._admit_host(token, request, now_s)
            answer = asyncio.create_task(letting_in, name=f"join {request.host}")
            found = self._joins[request.key] = JoinInProgress(token, request, answer, now_s)
        return await asyncio.shield(found.answer)

    def _check_request(self, request: JoinHost) -> None:
        if not self.mesh.settings.joinable:
            raise Refused(
                "this mesh has a single host",
                fix="Start it with `meshrl up --listen HOST` for several hosts",
            )
        if not HOST_NAME_PATTERN.fullmatch(request.host) or not ADDRESS_PATTERN.fullmatch(
            request.address
        ):
            raise Refused(
                f"invalid name {request.host!r:.60} or address {request.address!r:.60} of a host"
            )
        # before it is a member: the request would have the member's name
        if request.host == self.mesh.settings.host:
            raise Refused(
                f"{request.host} is the name of the head", fix="Join from a new directory"
            )
        if not KEY_PATTERN.fullmatch(request.key):
            raise Refused(f"{request.key!r:.60} is not the public key of a host")
        if request.version != read_release():
            raise Refused(
                f"this host has MeshRL {request.version:.40}, and the mesh has {read_release()}",
                fix="Install the same version on both",
            )

    async def _admit_host(self, token: str, request: JoinHost, now_s: float) -> HostAdmitted:
        mesh, host, public = self.mesh, request.host, _encode_public_key(request)
        try:
            await self._change_token_file(members.admit_member, token, host, public, now_s)
            secret = secrets.token_hex(SECRET_BYTES)
            # Includes the planner's, which the launcher leaves out if none is to run.
            roles = HOST_ROLES | {PLANNER_ROLE}
            about = {
                "admitted": asdict(
                    AdmittedHost.from_secret(host, secret, roles, mesh.clock.wall())
                ),
                "address": request.address,
                "workers": request.workers,
                "standby": request.standby,
                "ephemeral": request.ephemeral,
                "key": digest_key(public),
            }
            id = f"{token}.{secrets.token_hex(8)}"
            try:
                answer = await host_requests.submit_host_request(
                    mesh.state, mesh.clock, id, host_requests.JOIN, about
                )
            except Refused:  # then it is no member
                await self._change_token_file(members.undo_admission, token, host)
                raise
        # After any other error it may retry with the same key, which grants nothing before the
        # launcher has admitted it.
        except BaseException:
            self._joins.pop(request.key, None)
            raise
        mesh.log.info("a host has joined", host=host, address=request.address, token=token)
        return HostAdmitted(secret=secret, **answer)

    async def _change_token_file(self, change: Callable[..., None], *arguments: Any) -> None:
        """Change tokens and members on a thread, as another process may hold the file lock."""
        file = Path(self.mesh.settings.run_root) / "mesh" / RECORDS_FILE
        await self.mesh.host.run_blocking(change, file, *arguments, deadline_s=FILE_TIMEOUT_S)

    @call(Gateway.leave)
    async def leave(self, request: None) -> bool:
        """Remove the host of a member key; return True if there was one."""
        id, host = caller_id.get(), self._find_member_host()
        state, clock, about = self.mesh.state, self.mesh.clock, {"host": host}
        answer = await host_requests.submit_host_request(
            state, clock, f"{id}.leave", host_requests.LEAVE, about
        )
        self.mesh.log.info("a host has left", host=host)
        return bool(answer["left"])

    @call(Gateway.drain)
    async def drain(self, request: None) -> bool:
        """Drain the host of a member key, which is about to stop."""
        return bool((await self._request_launcher(host_requests.DRAIN))["changed"])

    @call(Gateway.notice)
    async def notice(self, report: NoticeReport) -> bool:
        """Record the notice of the host of a member key, which drains if its end is announced."""
        answer = await self._request_launcher(host_requests.NOTICE, notice=asdict(report))
        return bool(answer["changed"])

    @call(Gateway.back)
    async def back(self, address: str) -> bool:
        """End the drain of a host that has returned."""
        if not ADDRESS_PATTERN.fullmatch(address):
            raise Refused(f"{address!r:.60} is not the address of a host")
        answer = await self._request_launcher(host_requests.RETURN, address=address)
        return bool(answer["changed"])

    @call(Gateway.whereabouts)
    async def whereabouts(self, request: None) -> RedisLocation:
        """Return the current Redis location for the host of a member key."""
        return RedisLocation(**await self._request_launcher(host_requests.LOCATE))

    async def _request_launcher(self, kind: str, **arguments: Any) -> dict[str, Any]:
        """Request an answer of the launcher for the host of the request's member key."""
        mesh, request_id = self.mesh, f"{caller_id.get()}.{kind}.{secrets.token_hex(8)}"
        fields = {**arguments, "host": self._find_member_host()}
        return await host_requests.submit_host_request(
            mesh.state, mesh.clock, request_id, kind, fields
        )

    @call(Gateway.remaining)
    async def remaining(self, request: None) -> RemainingNames:
        """Return the services and instances left on the host of a member key."""
        state, host = self.mesh.state, self._find_member_host()
        return RemainingNames(
            await list_remaining(state, host), await pool.is_draining(state, host)
        )

    @call(Gateway.membership)
    async def membership(self, request: None) -> str:
        """Return the host of a member key."""
        return self._find_member_host()

    def _find_member_host(self) -> str:
        """Return the host of the request's member key. Raise NotFound for a token, which identifies
        no host.
        """
        known = self._tokens.find_member(caller_id.get())
        if known is None:
            raise NotFound("no joined host has this key", fix="Run `meshrl join`")
        return known.host


def _encode_public_key(request: JoinHost) -> bytes:
    return request.key.encode()
