"""A Redis that somebody else runs for a mesh, as in a container, with the files made for it."""

from __future__ import annotations

import asyncio
import datetime
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, MeshError, StateUnavailable
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.access.hosts import AdmittedHost
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.supervision.supervisor import Hooks
from meshrl.common.state import events, registry
from meshrl.common.state.hosts import rights
from meshrl.common.state.redis import embedded
from meshrl.common.state.redis.client import State
from meshrl.common.state.registry import Entry
from meshrl.directory.places import MeshPlace
from meshrl.launch.redis import guard
from meshrl.launch.redis.access import material
from meshrl.launch.redis.access.network import Network
from meshrl.launch.redis.server import MeshRedis
from meshrl.launch.redis.serving import can_tls
from tests.load import scaled

NEEDED = pytest.mark.needs("redis-server")
GUEST = "guest-00002"
WITHIN_S = 60.0


@dataclass
class Container:
    """The server, as compose runs it."""

    directory: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return embedded.configured_url()

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
        server = next(filter(can_tls, embedded.servers()))
        self.process = subprocess.Popen([server, *words], stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(scaled(WITHIN_S))


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch) -> Iterator[Container]:
    directory = Path(tempfile.mkdtemp(prefix="container-"))
    (directory / "redis").mkdir()
    found = Container(directory, guard.free_port())
    material.make(directory / "redis", "localhost", found.port, datetime.datetime.now(datetime.UTC))
    monkeypatch.setenv("MESHRL_REDIS_URL", str(directory / "redis/url"))
    yield found
    found.kill()
    shutil.rmtree(directory)


async def opened(url: str) -> State:
    """A connection, once the server answers."""
    async with asyncio.timeout(scaled(WITHIN_S)):
        while True:
            try:
                return await State.open(url, connect_s=scaled(5.0))
            except StateUnavailable:
                await asyncio.sleep(0.05)


@NEEDED
async def test_what_was_written_is_there_after_a_kill(container: Container) -> None:
    container.start()
    state = await opened(container.url)
    entry = Entry("worker/w0", "worker", incarnation="one")
    await registry.register(state, entry, 600_000)  # by a script, which writes a transaction
    await state.close()
    container.kill()
    container.start()
    state = await opened(container.url)
    found = await registry.lookup(state, "worker/w0")
    assert found is not None and found.incarnation == "one", "as `default` it leaves these out"
    await state.close()


@NEEDED
async def test_nobody_comes_in_without_the_password_or_another_authority(
    container: Container,
) -> None:
    container.start()
    await (await opened(container.url)).close()
    for wrong in (
        container.url.replace("mesh:", "mesh:x"),
        container.url.replace("mesh:", "default:"),
        container.url.partition("?")[0],  # its certificate is of nobody whom this machine knows
    ):
        with pytest.raises(MeshError):
            await State.open(wrong, connect_s=1.0)


@NEEDED
async def test_a_mesh_goes_on_when_it_starts_again(container: Container) -> None:
    head = AdmittedHost.of("head-000001", "aa" * 32, rights.ROLES, 1.0)
    guest = AdmittedHost.of(GUEST, "bb" * 32, ("node", "worker"), 1.0)
    place = MeshPlace(container.directory / "root")
    place.directory.mkdir(parents=True, mode=0o700)
    container.start()
    await (await opened(container.url)).close()
    redis = MeshRedis(
        *(SystemHost(), SystemClock(), place, "5e" * 32, (20, 120.0), Hooks()),
        went_back=lambda why: pytest.fail(why),
        network=Network(head, "127.0.0.1:*"),
    )
    try:
        await redis.connect()
        await redis.admit()
        await redis.admit_host(guest)
        told = redis.told
        settings = MeshSettings(
            *(told.far_url, str(place.root)),
            host=GUEST,
            secret="bb" * 32,
            joinable=True,
            authority=told.far_authority,
        )
        worker = await opened(settings.redis_as("worker"))
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


def test_a_file_names_the_server_and_the_authority_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, authority = tmp_path / "url", tmp_path / "authority.pem"
    monkeypatch.setenv("MESHRL_REDIS_URL", str(file))
    with pytest.raises(ConfigError, match="no URL of a Redis can be read"):
        embedded.configured_url()
    file.touch(0o600)
    for url, after in (
        ("rediss://mesh:secret@redis:6379/0", f"?ssl_ca_certs={authority}"),
        ("rediss://redis:6379?db=1", f"&ssl_ca_certs={authority}"),
        ("rediss://redis:6379?ssl_ca_certs=/own.pem", ""),
        ("redis://localhost/0", ""),
    ):
        authority.unlink(missing_ok=True)
        file.write_text(f"{url}\n")
        assert embedded.configured_url() == url
        authority.touch()
        assert embedded.configured_url() == url + after
    file.write_text("secret")
    with pytest.raises(ConfigError, match="no URL of a Redis") as caught:
        embedded.configured_url()
    assert "secret" not in str(caught.value)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read"):
        embedded.configured_url()
