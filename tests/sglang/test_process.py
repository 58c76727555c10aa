"""Process of a real SGLang server: its start, its isolation, and its exit with its parent."""

from __future__ import annotations

import asyncio
import copy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, PeerLost, RemoteFailure
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.launch_config import LaunchConfig
from meshrl.services.engine.sglang.ports import PortBlock
from meshrl.services.engine.sglang.server import SGLangServer
from tests.load import scaled
from tests.sglang import served
from tests.sglang.interpreter import REPOSITORY, python
from tests.sglang.processes import directory_of, environment_of, pids_of_session
from tests.unit.common.generation.engines_under_test import TINY

GONE_S = 10.0


def has_ended(session: int) -> bool:
    """Return True if no process of a session remains within a deadline."""
    until = time.monotonic() + scaled(GONE_S)
    while pids_of_session(session) and time.monotonic() < until:
        time.sleep(0.1)
    return not pids_of_session(session)


def test_killed_starter_leaves_no_server_process(tmp_path: Path) -> None:
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
    assert has_ended(session)


def test_server_runs_outside_the_repository_and_its_paths() -> None:
    server = served.server()
    assert REPOSITORY not in directory_of(server.pid).parents
    assert environment_of(server.pid).keys().isdisjoint({"PYTHONPATH", "VIRTUAL_ENV"})


def start(launch_config: LaunchConfig) -> None:
    deadline_s = scaled(200.0)
    asyncio.run(
        SGLangServer.start(SystemHost(), SystemClock(), launch_config, TINY, deadline_s=deadline_s)
    )


def test_failed_start_reports_its_reason_and_leaves_no_process(tmp_path: Path) -> None:
    launch_config = LaunchConfig(str(python()), tmp_path, 4, 64, options=("--no-such-flag", "1"))
    with pytest.raises(ConfigError, match="no-such-flag"):
        start(launch_config)


def test_missing_interpreter_error_names_the_fix(tmp_path: Path) -> None:
    launch_config = LaunchConfig(str(tmp_path / "python"), tmp_path, 4, 64)
    with pytest.raises(ConfigError, match="meshrl engine install sglang"):
        start(launch_config)


def test_foreign_server_at_the_port_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.engine()  # an update does not change the server's identification
    other = served.server()
    port = int(other.http.url.rpartition(":")[2])
    monkeypatch.setattr(PortBlock, "reserve", lambda: PortBlock(port))
    with pytest.raises(PeerLost, match="another server uses the port"):
        start(LaunchConfig(str(python()), tmp_path, 4, 64))
    other.http.spawn(other._check_server("disk")).result(scaled(20.0))
    assert other.ranks == served.engine().tensor_parallel_size == 1


def test_answer_without_json_is_a_server_error() -> None:
    http = served.server().http
    with pytest.raises(RemoteFailure, match="/docs did not answer with JSON"):
        http.call("GET", "/docs", deadline_s=scaled(20.0))
    assert "not answer with JSON" in http.spawn(http.probe("/docs", scaled(20.0))).result(
        scaled(20.0)
    )


def test_slots_longer_than_the_models_positions_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="positions"):
        start(LaunchConfig(str(python()), tmp_path, 4, TINY.max_positions + 1))


def test_features_are_read_from_the_servers_api_description() -> None:
    description = served.server().http.call("GET", "/openapi.json", deadline_s=scaled(20.0))
    for needs in (v0_5.REQUIRED_FIELDS, *v0_5.TRANSPORT_FIELDS.values()):
        assert v0_5.find_missing(description, needs) == []
    older = copy.deepcopy(description)
    del older["paths"][v0_5.BEGIN_UPDATE]
    del older["components"]["schemas"]["GenerateReqInput"]["properties"]["extra_key"]
    assert v0_5.find_missing(older, v0_5.REQUIRED_FIELDS) == ["/generate: extra_key"]
    assert v0_5.find_missing(older, v0_5.TRANSPORT_FIELDS["tensors"]) == ["/begin_weight_update"]
    assert v0_5.find_missing(older, v0_5.TRANSPORT_FIELDS["disk"]) == []
