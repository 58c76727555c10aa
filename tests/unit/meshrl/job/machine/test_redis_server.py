"""A Redis that cannot be used is said in its own words, before a mesh starts."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.common.base.errors import ConfigError, MeshError, StateUnavailable
from meshrl.common.state.redis import embedded
from meshrl.common.state.redis.client import State
from meshrl.launch.checks import redis_server
from tests.load import scaled

PASSWORD = "sesame-sesame"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a server that wants a password."""
    place = tmp_path_factory.mktemp("redis")
    server = embedded.command(place)
    with subprocess.Popen(
        [*server.argv, "--requirepass", PASSWORD], stdout=subprocess.DEVNULL
    ) as process:
        path = Path(server.url.removeprefix("unix://"))
        open_url = f"unix://:{PASSWORD}@{path}"

        async def ready() -> None:
            while True:
                try:
                    state = await State.open(open_url, connect_s=2)
                except StateUnavailable:
                    continue
                return await state.close()

        asyncio.run(asyncio.wait_for(ready(), scaled(30)))
        yield path
        process.kill()


def refusal(monkeypatch: pytest.MonkeyPatch, url: str) -> MeshError:
    monkeypatch.setenv("MESHRL_REDIS_URL", url)
    with pytest.raises((ConfigError, StateUnavailable)) as caught:
        redis_server.usable()
    said = str(caught.value)
    assert said.startswith("$MESHRL_REDIS_URL: ") and "\n" not in said and caught.value.fix
    assert PASSWORD not in said and "wrong-word" not in said
    return caught.value


def test_a_server_that_answers_is_fine(guarded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHRL_REDIS_URL", f"unix://:{PASSWORD}@{guarded}")
    redis_server.usable()
    monkeypatch.delenv("MESHRL_REDIS_URL")
    redis_server.usable()  # there is one to start


@pytest.mark.parametrize(
    ("user", "says"),
    [("", "Authentication required"), (":wrong-word@", "invalid username-password pair")],
)
def test_a_server_that_refuses_us_is_quoted(
    guarded: Path, monkeypatch: pytest.MonkeyPatch, user: str, says: str
) -> None:
    error = refusal(monkeypatch, f"unix://{user}{guarded}")
    assert isinstance(error, ConfigError) and says in error.message and "USER:PASSWORD" in error.fix


@pytest.mark.parametrize(
    "url",
    [
        "localhost:6379",
        "user:wrong-word@host:6379",
        "http://host",
        "redis://host:port",
        "6379",
        "unix:/x",
    ],
)
def test_what_is_no_url_of_a_redis_is_one_line(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    error = refusal(monkeypatch, url)
    assert isinstance(error, ConfigError) and "redis://HOST:PORT" in error.fix


def test_nobody_at_the_port_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    error = refusal(monkeypatch, f"redis://127.0.0.1:{port}/0")
    assert isinstance(error, StateUnavailable) and "Connect call failed" in error.message


def test_another_server_at_the_port_is_no_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    client.recv(1000)
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        error = refusal(monkeypatch, f"redis://127.0.0.1:{port}/0")
        listener.shutdown(socket.SHUT_RDWR)
    assert "no Redis" in error.message


def test_a_database_that_is_not_there_is_quoted(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = refusal(monkeypatch, f"unix://:{PASSWORD}@{guarded}?db=999")
    assert "DB index is out of range" in error.message
