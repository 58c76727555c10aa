"""Hosts that join a mesh: their join token, keys and return."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.commands.keys import _find_key, _find_valid_token
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, NotFound
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.access import members, token_registry
from meshrl.common.mesh.access.access_records import HOST_TOKEN as FOR_HOSTS
from meshrl.common.mesh.access.access_records import read_records
from meshrl.common.mesh.access.access_token import AccessToken
from meshrl.common.state.hosts import credentials
from meshrl.common.state.hosts.credentials import Credential
from meshrl.common.state.pool.store.documents import encode_worker
from meshrl.common.state.pool.workers.rows import WorkerRow
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.checks import address_checks
from meshrl.launch.hosts import host_join
from meshrl.launch.hosts.host_join import join_mesh
from meshrl.launch.hosts.host_launcher import HostShape
from meshrl.launch.hosts.host_offer import GIB, HostOffer, apply_offer
from meshrl.launch.hosts.membership import Membership
from meshrl.sim.redis.simulated_state import open_simulated_state

TICKET = AccessToken("tcp://10.0.0.5:7100", "g" * 40, "s" * 40)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MESHRL_JOIN", raising=False)
    path = tmp_path / "join.token"
    path.write_text(TICKET.encoded + "\n")
    path.chmod(0o600)
    return path


def test_join_token_is_read_from_file_url_stdin_or_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host_join.read_join_token(str(file)) == TICKET
    assert host_join.read_join_token(f"file://{file}") == TICKET
    monkeypatch.setattr("sys.stdin", io.StringIO(TICKET.encoded))
    assert host_join.read_join_token("-") == TICKET
    for told in (TICKET.encoded, str(file)):
        monkeypatch.setenv("MESHRL_JOIN", told)
        assert host_join.read_join_token(None) == TICKET


def test_token_on_the_command_line_is_rejected_and_not_repeated(file: Path) -> None:
    with pytest.raises(ConfigError, match="visible to all users") as error:
        host_join.read_join_token(TICKET.encoded)
    assert TICKET.encoded not in str(error.value)


def test_token_readable_by_others_is_rejected(file: Path) -> None:
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        host_join.read_join_token(str(file))
    place = "example.invalid/join.token"
    for scheme in ("http", "ftp", "HTTP", "simplecache::http", "filecache::https", "webhdfs"):
        with pytest.raises(ConfigError, match="can expose to the network"):
            host_join.read_join_token(f"{scheme}://{place}")
    with pytest.raises(ConfigError, match="can expose to the network"):
        host_join.read_join_token(f"zip://*::ftp://{place}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_readable_token_file_of_another_user_is_rejected(file: Path) -> None:
    os.chown(file, 12345, 12345)
    assert host_join.read_join_token(str(file)) == TICKET
    for mode in (0o640, 0o604):
        file.chmod(mode)
        with pytest.raises(ConfigError, match="other users can read the token"):
            host_join.read_join_token(str(file))


def test_missing_or_invalid_token_error_has_a_fix(file: Path) -> None:
    with pytest.raises(NotFound, match=r"mesh/join.token.*token create --host"):
        host_join.read_join_token(None)
    file.write_text("something else")
    with pytest.raises(ConfigError, match="is not a token") as error:
        host_join.read_join_token(f"file://{file}")
    assert "something else" not in str(error.value)


def test_head_cannot_join_a_mesh(tmp_path: Path, file: Path) -> None:
    (tmp_path / "mesh").mkdir()
    (tmp_path / "mesh/settings.json").write_text("{}")
    with pytest.raises(Exception, match="belongs to the head of another mesh"):
        join_mesh(str(file), tmp_path, HostOffer(), foreground=False)


@pytest.mark.parametrize("price", [float("nan"), float("inf"), -0.5])
def test_impossible_price_is_rejected_where_it_enters(tmp_path: Path, price: float) -> None:
    with pytest.raises(ConfigError, match="is no price") as caught:
        join_mesh("-", tmp_path, HostOffer(price=price), foreground=False)
    assert caught.value.where == "--price"
    with pytest.raises(ConfigError, match="is no price"):  # nor does a worker publish it
        encode_worker(WorkerRow("w0", "here", "cpu:0", 1, price=price))


@pytest.mark.parametrize(
    "where", ["", "0.0.0.0", "*:7100-7110", "[::]", "::1", "127.0.0.1:7100", "127.0.0.1:a"]
)
def test_unreachable_or_invalid_listen_address_is_rejected(where: str) -> None:
    with pytest.raises(ConfigError):
        address_checks.resolve_listen_endpoint(where)


def test_listen_ports_are_any_or_the_configured_ones() -> None:
    assert (
        address_checks.resolve_listen_endpoint("0.0.0.0:42100-42199", "head")
        == "tcp://0.0.0.0:42100-42199"
    )
    assert address_checks.resolve_listen_endpoint("*", "head") == "tcp://0.0.0.0:*"
    assert address_checks.resolve_listen_endpoint("127.0.0.1") == "tcp://127.0.0.1:*"
    assert (
        address_checks.resolve_listen_endpoint("localhost:42100-42199")
        == "tcp://127.0.0.1:42100-42199"
    )


HOST, THIEF = "gpu1-1f3a9c", "gpu2-2e4b8d"
ONE, OTHER = "a1b2c3d4" + "0" * 56, "a1b2c3d4" + "f" * 56


async def test_key_prefix_must_be_unique() -> None:
    state = open_simulated_state(SystemClock())
    await credentials.admit_host(state, HOST)
    await credentials.register_key(state, Credential("engine", HOST, ONE, "engine/g0.0"))
    assert await _find_key(state, ONE[:8]) == (ONE, f" of engine/g0.0 on {HOST}")
    with pytest.raises(NotFound, match="no admitted keys begin with ffffffff"):
        await _find_key(state, "f" * 8)
    await credentials.register_key(state, Credential("worker", HOST, OTHER, "worker/h1w0"))
    with pytest.raises(NotFound, match="2 admitted keys") as caught:
        await _find_key(state, ONE[:8])
    assert f"{OTHER[:16]} of worker/h1w0" in caught.value.fix
    assert (await _find_key(state, OTHER[:9]))[0] == OTHER
    await credentials.admit_host(state, THIEF)
    await credentials.register_key(state, Credential("engine", THIEF, ONE, "engine/g1.0"))
    shown = await _find_key(state, ONE[:9])
    assert shown == (ONE, f" of engine/g0.0 on {HOST} and engine/g1.0 on {THIEF}"), "still one key"
    gone = "0" * 64
    assert await _find_key(state, gone) == (gone, ""), "a whole one may have left its door"
    await state.close()


def test_expelled_hosts_valid_token_is_found(tmp_path: Path) -> None:
    path, hosts = (
        tmp_path / "tokens.json",
        {"once": "gpu1-aa", "any": "gpu2-bb", "ended": "gpu3-cc"},
    )
    for uses, (name, host) in zip((1, 0, 0), hosts.items(), strict=True):
        token, _ = token_registry.create_token(
            name, 60.0, 0.0, "tcp://h:1", "k", kind=FOR_HOSTS, uses=uses
        )
        token_registry.add_token(path, token)
        members.admit_member(path, token.id, host, host.encode(), 1.0)
    token_registry.revoke_tokens(path, "ended", 2.0)
    known = read_records(path)
    assert [_find_valid_token(known, host, 3.0) for host in hosts.values()] == ["", "any", ""]
    assert _find_valid_token(known, hosts["any"], 61.0) == ""
    assert _find_valid_token(known, "gpu9-zz", 3.0) == ""


SHAPE = HostShape(
    workers=2,
    market="spot",
    memory_bytes=GIB,
    planner_name="planner/2",
    accepted_services=("shards",),
)
SETTINGS = MeshSettings("", "here", host="gpu1-aa", metrics="off", network="ib", chunks_bytes=GIB)


def test_missing_options_keep_their_values() -> None:
    assert apply_offer(SHAPE, SETTINGS, HostOffer()) == (SHAPE, SETTINGS, [])


def test_local_options_are_applied_on_return() -> None:
    named = {"market", "memory", "disk", "cache", "metrics", "network", "services"}
    named |= {"rate_up", "rate_down"}
    offer = HostOffer(
        metrics="127.0.0.1:9",
        market="lent",
        memory_gib=3.0,
        disk_gib=4.0,
        network="",
        cache_gib=5.0,
        accepted_services=("sandboxes",),
        upload_mb_per_s=20.0,
        download_mb_per_s=0.5,
        given_options=named,
    )
    shape, settings, kept = apply_offer(SHAPE, SETTINGS, offer)
    sizes: dict[str, Any] = {"memory_bytes": 3 * GIB, "disk_bytes": 4 * GIB}
    assert shape == replace(SHAPE, market="lent", accepted_services=("sandboxes",), **sizes)
    now: dict[str, Any] = {"metrics": "127.0.0.1:9", "network": "", "chunks_bytes": 5 * GIB}
    now |= {"rate_up": 20_000_000, "rate_down": 500_000}
    assert settings == replace(SETTINGS, **now)
    assert kept == []


def test_options_known_to_the_head_are_kept_and_reported() -> None:
    same = HostOffer(workers=2, given_options={"workers", "device", "standby"})
    assert apply_offer(SHAPE, SETTINGS, same) == (SHAPE, SETTINGS, [])
    named = {"workers", "device", "ephemeral", "standby"}
    other = HostOffer(
        workers=0, device="cuda", ephemeral=True, accepts_standby=False, given_options=named
    )
    kept = ["--workers 2", "--device cpu", "not --ephemeral", "--standby"]
    assert apply_offer(SHAPE, SETTINGS, other) == (SHAPE, SETTINGS, kept)
    assert apply_offer(SHAPE, SETTINGS, HostOffer(0, given_options={"no_workers"}))[2] == [
        "--workers 2"
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--workers", "4"],
            "gpu1-aa keeps the options of its first join: --workers 2. To change them",
        ),
        (
            ["--no-workers"],
            "gpu1-aa keeps the options of its first join: --workers 2. To change them",
        ),
        (["--workers", "2", "--market", "lent"], ""),
        ([], ""),
    ],
)
def test_join_command_lists_the_options_it_ignores(
    tmp_path: Path, options: list[str], said: str
) -> None:
    place = MeshPaths(tmp_path)
    place.directory.mkdir()
    Membership("gpu1-aa", "tcp://127.0.0.1:9", "g" * 40, "s" * 40).write(place)
    SETTINGS.to_file(place.settings)
    SHAPE.write(place)
    # It stops at the address check, since the address belongs to another host.
    command = ["join", "--root", str(tmp_path), "--listen", "0.0.0.0", *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code != 0
    assert said in result.output if said else "stays what" not in result.output
