"""Redis of a mesh: persistence, certificates, passwords and reachable addresses."""

from __future__ import annotations

import asyncio
import datetime
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, MeshError, StateUnavailable
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.access.admitted_hosts import AdmittedHost
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.supervision.supervisor import SupervisorHooks
from meshrl.common.state import events, registry
from meshrl.common.state.hosts import acl
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.embedded_server import ServerListener
from meshrl.common.state.registry import RegistryEntry
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.redis import redis_watchdog
from meshrl.launch.redis.access import certificates, external_redis
from meshrl.launch.redis.access.redis_network import RedisNetwork, is_port_taken, resolve_remote_url
from meshrl.launch.redis.mesh_redis import MeshRedis
from meshrl.launch.redis.redis_configuration import can_use_tls
from meshrl.launch.redis.redis_watchdog import is_answering
from tests.load import scaled

NEEDED = pytest.mark.needs("redis-server")
GUEST = "guest-00002"
WITHIN_S = 60.0


@dataclass
class Container:
    """Redis server in a container, as compose runs it."""

    directory: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return embedded_server.read_configured_url()

    def start(self) -> None:
        files, kept = self.directory / "redis", self.directory / "data"
        kept.mkdir(exist_ok=True)
        options = {
            "port": 0,
            "tls-port": self.port,
            "tls-cert-file": files / "redis.pem",
            "tls-key-file": files / "redis-key.pem",
            "tls-ca-cert-file": files / "authority.pem",
            "tls-auth-clients": "no",
            "aclfile": files / "users.acl",
            "appendonly": "yes",
            "appendfsync": "always",
            "dir": kept,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        server = next(filter(can_use_tls, embedded_server.find_servers()))
        self.process = subprocess.Popen([server, *words], stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(scaled(WITHIN_S))


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch) -> Iterator[Container]:
    directory = Path(tempfile.mkdtemp(prefix="container-"))
    (directory / "redis").mkdir()
    found = Container(directory, redis_watchdog.find_free_port())
    external_redis.write_redis_files(
        directory / "redis", "localhost", found.port, datetime.datetime.now(datetime.UTC)
    )
    monkeypatch.setenv("MESHRL_REDIS_URL", str(directory / "redis/url"))
    yield found
    found.kill()
    shutil.rmtree(directory)


async def open_client(url: str) -> StateClient:
    """Return a connection once the server answers."""
    async with asyncio.timeout(scaled(WITHIN_S)):
        while True:
            try:
                return await StateClient.open(url, connect_timeout_s=scaled(5.0))
            except StateUnavailable:
                await asyncio.sleep(0.05)


@NEEDED
async def test_written_entry_survives_a_kill(container: Container) -> None:
    container.start()
    state = await open_client(container.url)
    entry = RegistryEntry("worker/w0", "worker", incarnation="one")
    await registry.register(state, entry, 600_000)  # by a script, which writes a transaction
    await state.close()
    container.kill()
    container.start()
    state = await open_client(container.url)
    found = await registry.lookup(state, "worker/w0")
    assert found is not None and found.incarnation == "one", "as `default` it leaves these out"
    await state.close()


@NEEDED
async def test_wrong_password_or_authority_is_rejected(
    container: Container,
) -> None:
    container.start()
    await (await open_client(container.url)).close()
    for wrong in (
        container.url.replace("mesh:", "mesh:x"),
        container.url.replace("mesh:", "default:"),
        container.url.partition("?")[0],  # no known authority has signed its certificate
    ):
        with pytest.raises(MeshError):
            await StateClient.open(wrong, connect_timeout_s=1.0)


@NEEDED
async def test_mesh_continues_after_a_restart(container: Container) -> None:
    head = AdmittedHost.from_secret("head-000001", "aa" * 32, acl.ROLES, 1.0)
    guest = AdmittedHost.from_secret(GUEST, "bb" * 32, ("node", "worker"), 1.0)
    place = MeshPaths(container.directory / "root")
    place.directory.mkdir(parents=True, mode=0o700)
    container.start()
    await (await open_client(container.url)).close()
    redis = MeshRedis(
        *(SystemHost(), SystemClock(), place, "5e" * 32, (20, 120.0), SupervisorHooks()),
        on_rollback=lambda why: pytest.fail(why),
        network=RedisNetwork(head, "127.0.0.1:*"),
    )
    try:
        await redis.connect()
        await redis.open_to_mesh()
        await redis.admit_host(guest)
        told = redis.addresses
        settings = MeshSettings(
            *(told.remote_url, str(place.root)),
            host=GUEST,
            secret="bb" * 32,
            joinable=True,
            authority=told.remote_ca_file,
        )
        worker = await open_client(settings.make_redis_url("worker"))
        container.kill()
        container.start()
        async with asyncio.timeout(scaled(WITHIN_S)):
            while True:
                try:
                    await events.append(worker, "hello", {})
                    break
                except StateUnavailable:
                    await asyncio.sleep(0.05)
        await worker.close()
    finally:
        await redis.stop()


def test_url_file_may_name_an_authority_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, authority = tmp_path / "url", tmp_path / "authority.pem"
    monkeypatch.setenv("MESHRL_REDIS_URL", str(file))
    with pytest.raises(ConfigError, match="the Redis URL cannot be read"):
        embedded_server.read_configured_url()
    file.touch(0o600)
    for url, after in (
        ("rediss://mesh:secret@redis:6379/0", f"?ssl_ca_certs={authority}"),
        ("rediss://redis:6379?db=1", f"&ssl_ca_certs={authority}"),
        ("rediss://redis:6379?ssl_ca_certs=/own.pem", ""),
        ("redis://localhost/0", ""),
    ):
        authority.unlink(missing_ok=True)
        file.write_text(f"{url}\n")
        assert embedded_server.read_configured_url() == url
        authority.touch()
        assert embedded_server.read_configured_url() == url + after
    file.write_text("secret")
    with pytest.raises(ConfigError, match="not a Redis URL") as caught:
        embedded_server.read_configured_url()
    assert "secret" not in str(caught.value)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="other users can read"):
        embedded_server.read_configured_url()


class PongServer:
    """Server that answers every command with PONG and sets an event at the first one."""

    def __init__(self) -> None:
        self.heard = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while block := await reader.read(1 << 16):
            self.heard.set()
            writer.write(b"+PONG\r\n" * block.count(b"*"))
            await writer.drain()
        writer.close()


async def test_watchdog_can_be_cancelled_at_any_moment() -> None:
    server = PongServer()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]

    async def watch() -> None:
        while True:
            await is_answering(f"redis://127.0.0.1:{port}/0")

    async with listening:
        for turns in range(120):  # turns of the event loop before the cancellation
            task = asyncio.create_task(watch())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=scaled(10.0))
            assert done, f"cancelled after {turns} turns of the loop, and it goes on"
            assert task.cancelled()
        assert server.heard.is_set()


HEAD = AdmittedHost("head-000001", {}, 0.0)
NOW = datetime.datetime(2026, 11, 23, tzinfo=datetime.UTC)


def read_authority(directory: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((directory / certificates.CA_FILE).read_bytes())


def read_certificate(directory: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((directory / certificates.CERTIFICATE_FILE).read_bytes())


def list_names(found: x509.Certificate) -> set[str]:
    held = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = {str(one) for one in held.get_values_for_type(x509.IPAddress)}
    return addresses | set(held.get_values_for_type(x509.DNSName))


def test_authority_is_kept_and_the_certificate_covers_the_current_address(
    tmp_path: Path,
) -> None:
    certificates.issue_certificate(tmp_path, ["10.0.0.1"], NOW)
    first, before = read_certificate(tmp_path), read_authority(tmp_path)
    certificates.issue_certificate(
        tmp_path, ["gpu1.example", "::1"], NOW + datetime.timedelta(days=30)
    )
    assert read_authority(tmp_path) == before and read_certificate(tmp_path) != first
    assert list_names(first) == {"10.0.0.1"} and list_names(read_certificate(tmp_path)) == {
        "gpu1.example",
        "::1",
    }
    read_certificate(tmp_path).verify_directly_issued_by(before)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_expiring_authority_is_replaced(tmp_path: Path) -> None:
    certificates.issue_certificate(tmp_path, ["10.0.0.1"], NOW)
    before = read_authority(tmp_path)
    certificates.issue_certificate(
        tmp_path, ["10.0.0.1"], NOW + certificates.VALIDITY - certificates.RENEWAL_MARGIN
    )
    assert read_authority(tmp_path) != before
    read_certificate(tmp_path).verify_directly_issued_by(read_authority(tmp_path))


def test_wildcard_address_needs_an_advertised_one() -> None:
    for anywhere in ("tcp://0.0.0.0:*", "tcp://*:7000-7099", "[::]:*"):
        with pytest.raises(ConfigError, match="at which other hosts cannot reach it"):
            _ = RedisNetwork(HEAD, anywhere).reachable_host
    assert RedisNetwork(HEAD, "tcp://*:*", "tcp://gpu1.example").reachable_host == "gpu1.example"
    assert RedisNetwork(HEAD, "10.0.0.1:*").reachable_host == "10.0.0.1"


def test_previous_port_is_reused_or_else_a_free_one(tmp_path: Path) -> None:
    first = RedisNetwork(HEAD, "127.0.0.1:*").make_listener(tmp_path, None)
    assert RedisNetwork(HEAD, "127.0.0.1:*").make_listener(tmp_path, None) == first
    with socket.create_server(("127.0.0.1", first.port)):
        assert RedisNetwork(HEAD, "127.0.0.1:*").make_listener(tmp_path, None).port != first.port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="is free for Redis"):
            RedisNetwork(HEAD, f"127.0.0.1:{port}").make_listener(tmp_path, None)
        assert is_port_taken(ServerListener("127.0.0.1", port))


def test_address_of_another_machine_is_not_reported_as_a_taken_port(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1, port 0"):
        RedisNetwork(HEAD, "192.0.2.1:*").make_listener(tmp_path, None)
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1, port 7000"):
        is_port_taken(ServerListener("192.0.2.1", 7000))


def test_external_server_must_be_reachable_by_tls(tmp_path: Path) -> None:
    wide, near = "10.0.0.1:*", "127.0.0.1:*"
    url = "rediss://me:secret@db.example:6390/2?ssl_ca_certs=%2Fca%20s.pem"
    assert resolve_remote_url(url, wide) == ("rediss://db.example:6390/2", "/ca s.pem")
    for plain in ("redis://me:secret@db.example:6390/0", "redis://db.example"):
        with pytest.raises(ConfigError, match="passwords to this Redis unencrypted") as caught:
            resolve_remote_url(plain, wide)
        assert "secret" not in str(caught.value)
    for url in ("unix:///run/redis.sock", "rediss://127.0.0.1:6379/0", "redis://localhost:1/0"):
        with pytest.raises(ConfigError, match="cannot reach"):
            resolve_remote_url(url, wide)
        assert resolve_remote_url(url, near) == (url, "")


def test_printed_url_has_no_credentials() -> None:
    told = {
        "unix://a:b@/run/redis.sock": "unix:///run/redis.sock",
        "unix://a:b@/run/redis.sock?db=1": "unix:///run/redis.sock?db=1",
        "redis://a:b@db:1?db=2": "redis://db:1/2",
        "rediss://:b@[::1]:6379/0": "rediss://[::1]:6379/0",
        "redis://db": "redis://db",
    }
    for url, bare in told.items():
        assert embedded_server.strip_credentials(url) == (bare, "")
