"""Where ranks meet, and by which interface: on one host they stay on it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.host.interfaces import address_of
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.weights.ways.meeting import NoPort, listen, place_of, ports_of
from meshrl.services.trainer.ranks import interfaces
from tests.load import scaled

CHOSEN: list[dict[str, str]] = [{}, {"NCCL_SOCKET_IFNAME": "ib0"}]
# Ranks are forks of one process that has imported PyTorch: one of each of CHOSEN, then two, of
# which the first has waited for the other in vain before, and the second is in a group of its own.
PROGRAM = """
import json, os, sys
from meshrl.common.api.ranks import Meeting
from meshrl.common.base.errors import RankLost
from meshrl.services.trainer.ranks.rank import join_group, leave_group

MEETS_S = float(sys.argv[3])

def at(name, within_s):
    return Meeting(1, f"{sys.argv[1]}/{name}", within_s)

def alone(chosen):
    os.environ.update(chosen)
    join_group(at(str(chosen), MEETS_S), 0, 1, "cpu")
    leave_group()
    return [os.environ[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "NCCL")]

def rank(number):
    if number == 0:
        try:
            join_group(at("early", 0.5), 0, 2, "cpu")
        except RankLost as error:
            leave_group()
    else:
        join_group(at("its own", MEETS_S), 0, 1, "cpu")
    join_group(at("late", MEETS_S), number, 2, "cpu")
    leave_group()
    return "met"

def fork(of, value):
    pid = os.fork()
    if pid == 0:
        os.write(1, (json.dumps(of(value)) + "\\n").encode())  # a line at once
        os._exit(0)
    return pid

for chosen in json.loads(sys.argv[2]):
    os.waitpid(fork(alone, chosen), 0)
both = [fork(rank, number) for number in (0, 1)]
sys.exit(any([os.waitpid(pid, 0)[1] for pid in both]))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """By the forks of PROGRAM."""
    inherited = {k: v for k, v in os.environ.items() if not k.endswith("_SOCKET_IFNAME")}
    words = str(tmp_path_factory.mktemp("ranks")), json.dumps(CHOSEN), str(scaled(30.0))
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        env={**inherited, "PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,
        timeout=scaled(120.0),
    )
    assert found.returncode == 0, found.stderr.decode()[-3000:]
    return [json.loads(line) for line in found.stdout.splitlines()]


@pytest.mark.deep
@pytest.mark.group("meeting")
@pytest.mark.parametrize(("which", "expected"), [(0, "=lo"), (1, "ib0")])
def test_ranks_meet_on_loopback_unless_an_interface_is_chosen(
    said: list[Any], which: int, expected: str
) -> None:
    assert said[which] == ["lo", expected]


@pytest.mark.deep
@pytest.mark.group("meeting")
def test_a_rank_that_has_waited_in_vain_meets_one_that_has_just_begun(said: list[Any]) -> None:
    assert said[2:] == ["met", "met"]


def test_other_hosts_reach_a_rank_by_what_its_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(interfaces.GLOO, raising=False)
    for bind, interface, expected in (
        ("tcp://127.0.0.1:7000-7010", "", "lo"),  # the one with that address
        ("tcp://127.0.0.1:*", "eth7", "eth7"),
        ("tcp://0.0.0.0:*", "", ""),
        ("tcp://192.0.2.254:*", "", ""),
    ):
        settings = MeshSettings("", "", bind=bind, interface=interface)
        assert interfaces.wide(settings) == expected, bind
    assert address_of("lo") == "127.0.0.1"
    assert address_of("none") == ""
    monkeypatch.setenv(interfaces.GLOO, "ib0,ib1")
    assert interfaces.wide(MeshSettings("", "", interface="eth7")) == "ib0"


def test_a_store_is_at_the_first_free_port_of_those_of_the_mesh() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        with pytest.raises(NoPort, match=f"{first} of 127.0.0.1") as refused:
            listen("127.0.0.1", range(first, first + 1))
        assert "FIRST-LAST" in refused.value.fix
        with listen("127.0.0.1", range(first, min(first + 100, 65536))) as door:
            port = door.getsockname()[1]
            assert port > first
            assert place_of(door, "word") == f"tcp://127.0.0.1:{port}/word"
    assert ports_of("tcp://127.0.0.1:7000-7010") == range(7000, 7011)
    assert list(ports_of("tcp://127.0.0.1:*")) == [0]
