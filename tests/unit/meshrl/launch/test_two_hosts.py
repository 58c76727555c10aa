"""Processes of two hosts in one mesh, with Redis users, TLS and a key for each process."""

from __future__ import annotations

import asyncio

import pytest

from loadtests.doors.calls import blank
from meshrl.common.api.sandbox import LoadJob, Sandbox
from meshrl.common.base.errors import HandshakeFailed, RemoteFailure
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.transport.address import format_key, parse_key
from meshrl.common.state.hosts import credentials
from tests.load import scaled
from tests.recording_actors import make_recording_actor
from tests.unit.meshrl.launch.test_redis_hosts import GUEST, HEAD
from tests.unit.meshrl.launch.test_redis_hosts import Mesh as Hosts
from tests.unit.meshrl.launch.test_redis_hosts import mesh as hosts

__all__ = ["hosts"]

pytestmark = pytest.mark.needs("redis-server")
REVOKED_S = 20.0


async def test_processes_of_two_hosts_call_each_other_until_revocation(hosts: Hosts) -> None:
    ran: list[str] = []
    async with hosts.up() as owner:
        await hosts.redis.admit_host(hosts.make_admitted_host(GUEST))
        sandbox = await Mesh.open("sandbox/job/0", "sandbox", hosts.settings(HEAD))
        rollout = await Mesh.open("rollout/job/0", "rollout", hosts.settings(GUEST))
        lost: list[str] = []
        rollout._lease._on_lost = lost.append  # instead of ending this process
        try:
            await sandbox.join(make_recording_actor("sandbox", ran))
            await rollout.join(None)
            shown = {
                (row.role, row.host, row.public_key)
                for row in await credentials.list_credentials(owner)
            }
            assert shown == {
                ("sandbox", HEAD, format_key(parse_key(sandbox.transport.address))),
                ("rollout", GUEST, format_key(parse_key(rollout.transport.address))),
            }

            async def call(deadline_s: float) -> None:
                await rollout.ref("sandbox/job/0").call(
                    Sandbox.load_job, blank(LoadJob), deadline_s=deadline_s
                )

            with pytest.raises(RemoteFailure, match="returned a NoneType"):
                await call(scaled(30.0))
            assert ran == ["Sandbox.load_job"]
            assert await credentials.revoke_key(
                owner, format_key(parse_key(rollout.transport.address))
            )
            async with asyncio.timeout(scaled(REVOKED_S)):
                while not lost:
                    await asyncio.sleep(0.05)
            assert "revoked" in lost[0]
            with pytest.raises(
                HandshakeFailed, match=r"key of this process.* is no longer admitted"
            ):
                while True:
                    try:
                        await call(scaled(10.0))
                    except RemoteFailure:  # the revocation has not reached the other process yet
                        await asyncio.sleep(0.05)
        finally:
            await rollout.leave()
            await sandbox.leave()
        assert await credentials.list_credentials(owner) == []
