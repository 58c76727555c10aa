"""A host that joins: its invitation, its keys, and its return."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.commands.keys import _key, _still_good
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, NotFound
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.access import members, tokens
from meshrl.common.mesh.access.records import HOST as FOR_HOSTS
from meshrl.common.mesh.access.records import read
from meshrl.common.mesh.access.ticket import Ticket
from meshrl.common.state.hosts import doors
from meshrl.common.state.hosts.doors import Row
from meshrl.directory.places import MeshPlace
from meshrl.launch.checks import addresses
from meshrl.launch.hosts import joining
from meshrl.launch.hosts.hosting import HostShape
from meshrl.launch.hosts.joining import join
from meshrl.launch.hosts.membership import Membership
from meshrl.launch.hosts.returning import GIB, Offer, as_told
from meshrl.sim.redis.state import simulated_state

TICKET = Ticket("tcp://10.0.0.5:7100", "g" * 40, "s" * 40)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MESHRL_JOIN", raising=False)
    path = tmp_path / "join.token"
    path.write_text(TICKET.text + "\n")
    path.chmod(0o600)
    return path


def test_it_is_read_from_a_file_a_url_the_input_or_the_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert joining.found(str(file)) == TICKET
    assert joining.found(f"file://{file}") == TICKET
    monkeypatch.setattr("sys.stdin", io.StringIO(TICKET.text))
    assert joining.found("-") == TICKET
    for told in (TICKET.text, str(file)):
        monkeypatch.setenv("MESHRL_JOIN", told)
        assert joining.found(None) == TICKET


def test_a_token_on_a_command_line_is_refused_and_not_repeated(file: Path) -> None:
    with pytest.raises(ConfigError, match="seen by everybody") as error:
        joining.found(TICKET.text)
    assert TICKET.text not in str(error.value)


def test_what_shows_it_to_others_is_refused(file: Path) -> None:
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        joining.found(str(file))
    place = "example.invalid/join.token"
    for scheme in ("http", "ftp", "HTTP", "simplecache::http", "filecache::https", "webhdfs"):
        with pytest.raises(ConfigError, match="shows it to the network"):
            joining.found(f"{scheme}://{place}")
    with pytest.raises(ConfigError, match="shows it to the network"):
        joining.found(f"zip://*::ftp://{place}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_a_file_of_somebody_else_that_others_can_read_is_refused(file: Path) -> None:
    os.chown(file, 12345, 12345)
    assert joining.found(str(file)) == TICKET
    for mode in (0o640, 0o604):
        file.chmod(mode)
        with pytest.raises(ConfigError, match="others can read the token"):
            joining.found(str(file))


def test_what_is_none_says_what_to_do(file: Path) -> None:
    with pytest.raises(NotFound, match=r"mesh/join.token.*token create --host"):
        joining.found(None)
    file.write_text("something else")
    with pytest.raises(ConfigError, match="is no token") as error:
        joining.found(f"file://{file}")
    assert "something else" not in str(error.value)


def test_a_head_does_not_join_a_mesh(tmp_path: Path, file: Path) -> None:
    (tmp_path / "mesh").mkdir()
    (tmp_path / "mesh/settings.json").write_text("{}")
    with pytest.raises(Exception, match="is the head of a mesh"):
        join(str(file), tmp_path, Offer(), foreground=False)


@pytest.mark.parametrize(
    "where", ["", "0.0.0.0", "*:7100-7110", "[::]", "::1", "127.0.0.1:7100", "127.0.0.1:a"]
)
def test_hosts_listen_where_others_reach_them(where: str) -> None:
    with pytest.raises(ConfigError):
        addresses.reachable(where)


def test_ports_are_any_or_those_that_were_named() -> None:
    assert addresses.reachable("0.0.0.0:42100-42199", "head") == "tcp://0.0.0.0:42100-42199"
    assert addresses.reachable("*", "head") == "tcp://0.0.0.0:*"
    assert addresses.reachable("127.0.0.1") == "tcp://127.0.0.1:*"
    assert addresses.reachable("localhost:42100-42199") == "tcp://127.0.0.1:42100-42199"


HOST, THIEF = "gpu1-1f3a9c", "gpu2-2e4b8d"
ONE, OTHER = "a1b2c3d4" + "0" * 56, "a1b2c3d4" + "f" * 56


async def test_a_key_is_meant_by_how_it_begins_and_never_one_of_two() -> None:
    state = simulated_state(SystemClock())
    await doors.admit_host(state, HOST)
    await doors.enter(state, Row("engine", HOST, ONE, "engine/g0.0"))
    assert await _key(state, ONE[:8]) == (ONE, f" of engine/g0.0 on {HOST}")
    with pytest.raises(NotFound, match="no keys that are let in begin with ffffffff"):
        await _key(state, "f" * 8)
    await doors.enter(state, Row("worker", HOST, OTHER, "worker/h1w0"))
    with pytest.raises(NotFound, match="2 keys") as caught:
        await _key(state, ONE[:8])
    assert f"{OTHER[:16]} of worker/h1w0" in caught.value.fix
    assert (await _key(state, OTHER[:9]))[0] == OTHER
    await doors.admit_host(state, THIEF)
    await doors.enter(state, Row("engine", THIEF, ONE, "engine/g1.0"))
    shown = await _key(state, ONE[:9])
    assert shown == (ONE, f" of engine/g0.0 on {HOST} and engine/g1.0 on {THIEF}"), "still one key"
    gone = "0" * 64
    assert await _key(state, gone) == (gone, ""), "a whole one may have left its door"
    await state.close()


def test_who_expels_a_host_is_told_of_the_token_that_would_let_it_in_again(tmp_path: Path) -> None:
    path, hosts = (
        tmp_path / "tokens.json",
        {"once": "gpu1-aa", "any": "gpu2-bb", "ended": "gpu3-cc"},
    )
    for uses, (name, host) in zip((1, 0, 0), hosts.items(), strict=True):
        token, _ = tokens.made(name, 60.0, 0.0, "tcp://h:1", "k", kind=FOR_HOSTS, uses=uses)
        tokens.keep(path, token)
        members.let_in(path, token.id, host, host.encode(), 1.0)
    tokens.revoke(path, "ended", 2.0)
    known = read(path)
    assert [_still_good(known, host, 3.0) for host in hosts.values()] == ["", "any", ""]
    assert _still_good(known, hosts["any"], 61.0) == ""
    assert _still_good(known, "gpu9-zz", 3.0) == ""


SHAPE = HostShape(
    workers=2, market="spot", memory_bytes=GIB, planner="planner/2", takes=("shards",)
)
SETTINGS = MeshSettings("", "here", host="gpu1-aa", metrics="off", network="ib", chunks_bytes=GIB)


def test_what_is_not_said_stays() -> None:
    assert as_told(SHAPE, SETTINGS, Offer()) == (SHAPE, SETTINGS, [])


def test_what_the_head_need_not_know_is_taken() -> None:
    named = {"market", "memory", "disk", "cache", "metrics", "network", "services"}
    named |= {"rate_up", "rate_down"}
    offer = Offer(
        metrics="127.0.0.1:9",
        market="lent",
        memory_gib=3.0,
        disk_gib=4.0,
        network="",
        cache_gib=5.0,
        takes=("sandboxes",),
        rate_up_mb=20.0,
        rate_down_mb=0.5,
        named=named,
    )
    shape, settings, kept = as_told(SHAPE, SETTINGS, offer)
    sizes: dict[str, Any] = {"memory_bytes": 3 * GIB, "disk_bytes": 4 * GIB}
    assert shape == replace(SHAPE, market="lent", takes=("sandboxes",), **sizes)
    now: dict[str, Any] = {"metrics": "127.0.0.1:9", "network": "", "chunks_bytes": 5 * GIB}
    now |= {"rate_up": 20_000_000, "rate_down": 500_000}
    assert settings == replace(SETTINGS, **now)
    assert kept == []


def test_what_it_would_have_to_know_is_not_and_that_is_said() -> None:
    same = Offer(workers=2, named={"workers", "device", "standby"})
    assert as_told(SHAPE, SETTINGS, same) == (SHAPE, SETTINGS, [])
    named = {"workers", "device", "ephemeral", "standby"}
    other = Offer(workers=0, device="cuda", ephemeral=True, standby=False, named=named)
    kept = ["--workers 2", "--device cpu", "not --ephemeral", "--standby"]
    assert as_told(SHAPE, SETTINGS, other) == (SHAPE, SETTINGS, kept)
    assert as_told(SHAPE, SETTINGS, Offer(0, named={"no_workers"}))[2] == ["--workers 2"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workers", "4"], "gpu1-aa stays what it joined as: --workers 2. For something else"),
        (["--no-workers"], "gpu1-aa stays what it joined as: --workers 2. For something else"),
        (["--workers", "2", "--market", "lent"], ""),
        ([], ""),
    ],
)
def test_the_command_says_which_options_it_does_not_take(
    tmp_path: Path, options: list[str], said: str
) -> None:
    place = MeshPlace(tmp_path)
    place.directory.mkdir()
    Membership("gpu1-aa", "tcp://127.0.0.1:9", "g" * 40, "s" * 40).write(place)
    SETTINGS.to_file(place.settings)
    SHAPE.write(place)
    # It goes no further than to the address, which is not this host's alone.
    command = ["join", "--root", str(tmp_path), "--listen", "0.0.0.0", *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code != 0
    assert said in result.output if said else "stays what" not in result.output
