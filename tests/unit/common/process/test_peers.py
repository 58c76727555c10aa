"""Which users have connected to a port, as the kernel tells it."""

from __future__ import annotations

import os
import socket

import pytest

from common.process.peers import foreign_clients, own_listeners

NOBODY = 65534


def test_a_process_knows_its_own_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert port in own_listeners()
    assert port not in own_listeners()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_clients_of_other_users_are_told_from_ours(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection((host, port)):
            assert foreign_clients({port}) == set()
        told, tell = os.pipe()
        stay, leave = os.pipe()
        stranger = os.fork()
        if stranger == 0:
            os.close(leave)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            connected = socket.socket(family)
            connected.connect((host, port))
            os.write(tell, b"!")
            os.read(stay, 1)
            os._exit(0)
        assert os.read(told, 1)
        assert foreign_clients({port}) == {NOBODY}
        assert foreign_clients({port + 1}) == set()
        os.close(leave)
        os.waitpid(stranger, 0)
        for descriptor in (told, tell, stay):
            os.close(descriptor)
