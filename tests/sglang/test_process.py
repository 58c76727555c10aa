"""The process of a real SGLang server: its start, its surroundings, and its end with ours."""

from __future__ import annotations

import asyncio
import copy
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, PeerLost, RemoteFailure
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.server import LaunchConfig, SGLangServer, find_free_port
from tests.load import scaled
from tests.sglang import served
from tests.sglang.interpreter import REPOSITORY, python
from tests.sglang.processes import directory_of, environment_of, pids_of_session
from tests.unit.common.generation.engines_under_test import TINY

GONE_S = 10.0


def ended(session: int) -> bool:
    """Whether nothing of a session runs, after some patience."""
    until = time.monotonic() + scaled(GONE_S)
    while pids_of_session(session) and time.monotonic() < until:
        time.sleep(0.1)
    return not pids_of_session(session)


def test_nothing_of_a_server_outlives_a_starter_that_is_killed(tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-m", "tests.sglang.starter", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert starter.stdout is not None
    session = int(starter.stdout.readline())
    assert len(pids_of_session(session)) >= 3  # with its scheduler and detokenizer
    starter.kill()
    starter.wait(scaled(5))
    assert ended(session)


def test_a_server_lives_outside_our_tree_and_our_paths() -> None:
    server = served.server()
    assert REPOSITORY not in directory_of(server.pid).parents
    assert environment_of(server.pid).keys().isdisjoint({"PYTHONPATH", "VIRTUAL_ENV"})


def start(how: LaunchConfig) -> None:
    deadline_s = scaled(200.0)
    asyncio.run(SGLangServer.start(SystemHost(), SystemClock(), how, TINY, deadline_s=deadline_s))


def test_a_server_that_does_not_start_says_why_and_is_gone(tmp_path: Path) -> None:
    how = LaunchConfig(str(python()), tmp_path, 4, 64, options=("--no-such-flag", "1"))
    with pytest.raises(ConfigError, match="no-such-flag"):
        start(how)


def test_without_an_interpreter_the_fix_is_named(tmp_path: Path) -> None:
    how = LaunchConfig(str(tmp_path / "python"), tmp_path, 4, 64)
    with pytest.raises(ConfigError, match="meshrl engine install sglang"):
        start(how)


def test_a_port_that_is_handed_out_is_free() -> None:
    for _ in range(5):
        with socket.socket() as taker:
            taker.bind(("127.0.0.1", find_free_port()))


def test_a_server_that_took_the_port_first_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.engine()  # an update does not change what a server is known by
    other = served.server()
    port = int(other.http.url.rpartition(":")[2])
    monkeypatch.setattr("meshrl.services.engine.sglang.server.find_free_port", lambda: port)
    with pytest.raises(PeerLost, match="another server has taken the port"):
        start(LaunchConfig(str(python()), tmp_path, 4, 64))
    other.http.spawn(other._check_server("disk")).result(scaled(20.0))
    assert other.ranks == served.engine().tensor_parallel_size == 1


def test_an_answer_that_is_no_json_is_an_error_of_the_server() -> None:
    http = served.server().http
    with pytest.raises(RemoteFailure, match="/docs answered no JSON"):
        http.call("GET", "/docs", deadline_s=scaled(20.0))
    assert "no JSON" in http.spawn(http.probe("/docs", scaled(20.0))).result(scaled(20.0))


def test_slots_longer_than_the_models_positions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="positions"):
        start(LaunchConfig(str(python()), tmp_path, 4, TINY.max_positions + 1))


def test_features_are_read_from_the_servers_own_description() -> None:
    described = served.server().http.call("GET", "/openapi.json", deadline_s=scaled(20.0))
    for needs in (v0_5.REQUIRED_FIELDS, *v0_5.TRANSPORT_FIELDS.values()):
        assert v0_5.find_missing(described, needs) == []
    older = copy.deepcopy(described)
    del older["paths"][v0_5.BEGIN_UPDATE]
    del older["components"]["schemas"]["GenerateReqInput"]["properties"]["extra_key"]
    assert v0_5.find_missing(older, v0_5.REQUIRED_FIELDS) == ["/generate: extra_key"]
    assert v0_5.find_missing(older, v0_5.TRANSPORT_FIELDS["tensors"]) == ["/begin_weight_update"]
    assert v0_5.find_missing(older, v0_5.TRANSPORT_FIELDS["disk"]) == []
