"""A mesh can listen where its job says, or it is said before it starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.launch.checks import addresses
from tests.unit.meshrl.job.machine.conftest import read, refusal


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://0.0.0.0:*", "tcp://localhost:*"])
def test_addresses_of_this_host_are_fine(place: Path, endpoint: str) -> None:
    addresses.bind(read(place, f"mesh.bind={endpoint}"))


def test_an_address_of_another_host_is_refused(place: Path) -> None:
    said = refusal(addresses.bind, place, "mesh.bind=tcp://192.0.2.1:*")  # of no host: RFC 5737
    assert "no process can listen at 'tcp://192.0.2.1:*'" in said and "127.0.0.1" in said
    assert "192.0.2.1" in refusal(addresses.metrics, place, "mesh.metrics=192.0.2.1:*")


def test_one_port_is_too_few_for_the_processes_of_a_mesh(place: Path) -> None:
    said = refusal(addresses.bind, place, "mesh.bind=tcp://127.0.0.1:5555")
    assert "names one port" in said and "Write * in place of the port" in said


def test_a_range_with_too_few_ports_says_how_many_are_needed() -> None:
    addresses.room("tcp://127.0.0.1:*", 12)
    addresses.room("tcp://127.0.0.1:29400-29900", 12)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=r"0 of the 1 ports .* take 12") as caught:
            addresses.room(f"tcp://127.0.0.1:{port}-{port}", 12)
    assert "LOW-HIGH" in caught.value.fix


def test_metrics_take_a_free_port_for_each_process(place: Path) -> None:
    addresses.metrics(read(place, "mesh.metrics=off"))
    addresses.metrics(read(place))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal(addresses.metrics, place, f"mesh.metrics=127.0.0.1:{port}")
    assert "has 0 free ports" in said and "12 processes" in said and "HOST:*" in said
    assert "free ports" in refusal(addresses.metrics, place, "mesh.metrics=127.0.0.1:29400-29402")
    addresses.metrics(read(place, "mesh.metrics=127.0.0.1:29400-29900"))
