"""Where the token that a host joins with may be, and what is said of it where it may not."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from meshrl.common.base.errors import ConfigError, NotFound
from meshrl.common.mesh.access.ticket import Ticket
from meshrl.launch.checks import addresses
from meshrl.launch.hosts import joining
from meshrl.launch.hosts.joining import join
from meshrl.launch.hosts.returning import Offer

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
