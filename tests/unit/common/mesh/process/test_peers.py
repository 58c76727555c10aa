"""Which users have connected to a port, as the kernel tells it."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address

import pytest

from meshrl.common.mesh.process.peers import SocketEnd, client_hosts, foreign_clients, listeners

NOBODY = 65534


def end_of(listener: socket.socket) -> SocketEnd:
    host, port = listener.getsockname()[:2]
    return SocketEnd(ip_address(host), port)


def test_a_process_knows_its_own_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        end = end_of(listener)
        assert end in listeners()
    assert end not in listeners()


@pytest.mark.parametrize("everywhere", [False, True])
def test_it_is_told_where_clients_come_from(everywhere: bool) -> None:
    family, host = (socket.AF_INET6, "::") if everywhere else (socket.AF_INET, "127.0.0.1")
    about = {"family": family, "dualstack_ipv6": everywhere}
    with (
        socket.create_server((host, 0), **about) as listener,  # type: ignore[arg-type]
        socket.create_server((host, 0), **about) as other,  # type: ignore[arg-type]
    ):
        end, of_others = end_of(listener), end_of(other)
        assert client_hosts({end}) == set()
        source = ("127.0.0.2", 0)
        with socket.create_connection(("127.0.0.1", end.port), source_address=source):
            assert client_hosts({end}) == {"127.0.0.2"}
            assert client_hosts({of_others}) == set()
            assert client_hosts({SocketEnd(ip_address("127.0.0.3"), end.port)}) == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_clients_of_other_users_are_told_from_ours(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_server((host, 0), family=family) as other,
    ):
        end, of_others = end_of(listener), end_of(other)
        with socket.create_connection((host, end.port)):
            assert foreign_clients({end}) == set()
        told, tell = os.pipe()
        stay, leave = os.pipe()
        stranger = os.fork()
        if stranger == 0:
            os.close(leave)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            connected = socket.socket(family)
            connected.connect((host, end.port))
            os.write(tell, b"!")
            os.read(stay, 1)
            os._exit(0)
        assert os.read(told, 1)
        assert foreign_clients({end}) == {NOBODY}
        assert foreign_clients({of_others}) == set()
        os.close(leave)
        os.waitpid(stranger, 0)
        for descriptor in (told, tell, stay):
            os.close(descriptor)
