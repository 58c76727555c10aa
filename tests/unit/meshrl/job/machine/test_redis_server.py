"""Checks of the machine that a job needs: addresses, quota and Redis server."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.common.base.errors import ConfigError, MeshError, StateUnavailable
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.redis.client import StateClient
from meshrl.job.checks.host import all_checks
from meshrl.job.model_files import count_parameters
from meshrl.launch.checks import address_checks, redis_checks
from tests.load import scaled
from tests.unit.meshrl.job.machine.conftest import get_error, read

PASSWORD = "sesame-sesame"


@pytest.fixture(scope="module")
def guarded_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start a server with a password and yield its socket."""
    place = tmp_path_factory.mktemp("redis")
    server = embedded_server.prepare_server(place)
    with subprocess.Popen(
        [*server.argv, "--requirepass", PASSWORD], stdout=subprocess.DEVNULL
    ) as process:
        path = Path(server.url.removeprefix("unix://"))
        open_url = f"unix://:{PASSWORD}@{path}"

        async def ready() -> None:
            while True:
                try:
                    state = await StateClient.open(open_url, connect_timeout_s=2)
                except StateUnavailable:
                    continue
                return await state.close()

        asyncio.run(asyncio.wait_for(ready(), scaled(30)))
        yield path
        process.kill()


def get_redis_error(monkeypatch: pytest.MonkeyPatch, url: str) -> MeshError:
    monkeypatch.setenv("MESHRL_REDIS_URL", url)
    with pytest.raises((ConfigError, StateUnavailable)) as caught:
        redis_checks.require_usable_redis()
    said = str(caught.value)
    assert said.startswith("$MESHRL_REDIS_URL: ") and "\n" not in said and caught.value.fix
    assert PASSWORD not in said and "wrong-word" not in said
    return caught.value


def test_answering_server_is_accepted(
    guarded_socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHRL_REDIS_URL", f"unix://:{PASSWORD}@{guarded_socket}")
    redis_checks.require_usable_redis()
    monkeypatch.delenv("MESHRL_REDIS_URL")
    redis_checks.require_usable_redis()  # a server program exists


@pytest.mark.parametrize(
    ("user", "says"),
    [("", "Authentication required"), (":wrong-word@", "invalid username-password pair")],
)
def test_rejection_by_the_server_is_quoted(
    guarded_socket: Path, monkeypatch: pytest.MonkeyPatch, user: str, says: str
) -> None:
    error = get_redis_error(monkeypatch, f"unix://{user}{guarded_socket}")
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
def test_invalid_redis_url_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    error = get_redis_error(monkeypatch, url)
    assert isinstance(error, ConfigError) and "redis://HOST:PORT" in error.fix


def test_refused_connection_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    error = get_redis_error(monkeypatch, f"redis://127.0.0.1:{port}/0")
    assert isinstance(error, StateUnavailable) and "Connect call failed" in error.message


def test_other_server_at_the_port_is_reported_as_no_redis(monkeypatch: pytest.MonkeyPatch) -> None:
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
        error = get_redis_error(monkeypatch, f"redis://127.0.0.1:{port}/0")
        listener.shutdown(socket.SHUT_RDWR)
    assert "not Redis" in error.message


def test_missing_database_is_quoted(guarded_socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = get_redis_error(monkeypatch, f"unix://:{PASSWORD}@{guarded_socket}?db=999")
    assert "DB index is out of range" in error.message


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://0.0.0.0:*", "tcp://localhost:*"])
def test_addresses_of_this_host_are_accepted(place: Path, endpoint: str) -> None:
    address_checks.check_bind_address(read(place, f"mesh.bind={endpoint}"))


def test_address_of_another_host_is_rejected(place: Path) -> None:
    # an address of no host (RFC 5737)
    error = get_error(address_checks.check_bind_address, place, "mesh.bind=tcp://192.0.2.1:*")
    assert "processes cannot listen at 'tcp://192.0.2.1:*'" in error and "127.0.0.1" in error
    assert "192.0.2.1" in get_error(
        address_checks.check_metrics_ports, place, "mesh.metrics=192.0.2.1:*"
    )


def test_single_port_is_rejected_for_a_mesh(place: Path) -> None:
    error = get_error(address_checks.check_bind_address, place, "mesh.bind=tcp://127.0.0.1:5555")
    assert "has one port" in error and "Replace the port with *" in error


def test_too_small_port_range_names_the_needed_count() -> None:
    address_checks.require_free_ports("tcp://127.0.0.1:*", 12)
    address_checks.require_free_ports("tcp://127.0.0.1:29400-29900", 12)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=r"0 of the 1 ports .* need 12") as caught:
            address_checks.require_free_ports(f"tcp://127.0.0.1:{port}-{port}", 12)
    assert "LOW-HIGH" in caught.value.fix


def test_metrics_need_a_free_port_for_each_process(place: Path) -> None:
    address_checks.check_metrics_ports(read(place, "mesh.metrics=off"))
    address_checks.check_metrics_ports(read(place))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = get_error(
            address_checks.check_metrics_ports, place, f"mesh.metrics=127.0.0.1:{port}"
        )
    assert "has 0 free ports" in error and "12 processes" in error and "HOST:*" in error
    assert "free ports" in get_error(
        address_checks.check_metrics_ports, place, "mesh.metrics=127.0.0.1:29400-29402"
    )
    address_checks.check_metrics_ports(read(place, "mesh.metrics=127.0.0.1:29400-29900"))


GIB = 1 << 30


def test_weights_quota_must_fit_the_concurrent_versions(place: Path) -> None:
    of_one = count_parameters(read(place).config) * 4 / GIB
    terms = ("budget.steps=40", "training.keep_checkpoints=2", "training.checkpoint_every=4")
    error = get_error(
        all_checks.check_weights_quota, place, *terms, f"weights.quota_gb={3.9 * of_one}"
    )
    assert "too small for the 4 versions" in error and "training.keep_checkpoints" in error
    all_checks.check_weights_quota(read(place, *terms, f"weights.quota_gb={4 * of_one}"))
    half = (f"weights.quota_gb={2 * of_one}", 'rollout.dtype="bfloat16"')
    all_checks.check_weights_quota(read(place, *terms, *half))
    all_checks.check_weights_quota(read(place, *terms))
