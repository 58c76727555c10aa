"""Checks that a mesh can listen where it is to: addresses are bound and let go."""

from __future__ import annotations

import socket
from collections.abc import Callable

import zmq

from common.errors import ConfigError
from common.settings import OFF, metrics_ports
from meshrl.job.jobfile import JobFile
from meshrl.launch import plan


def bind(job: JobFile) -> None:
    """Every process of the job's mesh finds a port."""
    _named(job, "mesh.bind", lambda: listens(job.config.mesh.bind))


def metrics(job: JobFile) -> None:
    """Every process of the job's mesh finds a port for its metrics."""
    config = job.config
    # A worker and its role process each serve their own.
    processes = len(plan.services_of(config)) + 2 * config.mesh.workers
    _named(job, "mesh.metrics", lambda: serves(config.mesh.metrics, processes))


def _named(job: JobFile, key: str, look: Callable[[], None]) -> None:
    try:
        look()
    except ConfigError as error:
        raise job.fail(key, f"{key}: {error.message}", error.fix) from error


def listens(endpoint: str) -> None:
    """ConfigError unless processes can listen at `endpoint`, tcp://INTERFACE:PORT."""
    if not endpoint.endswith(":*"):
        raise ConfigError(
            f"{endpoint!r} names one port, and a mesh has many processes",
            fix="Write * in place of the port",
        )
    with zmq.Context() as context, context.socket(zmq.ROUTER) as tried:
        try:
            tried.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"no process can listen at {endpoint!r}: {error.strerror}",
                fix="Name an address of this host, as `ip address` lists them, or "
                '"tcp://127.0.0.1:*"',
            ) from error
    # Bulk bytes have a plain socket, which knows addresses and names, and no interfaces.
    _bound(endpoint.removeprefix("tcp://").rpartition(":")[0], 0)


def serves(where: str, processes: int) -> None:
    """ConfigError unless `where`, as of `mesh.metrics`, has a free port for each process."""
    if where == OFF:
        return
    interface, ports = metrics_ports(where)
    if ports == range(0, 1):
        _bound(interface, 0)
        return
    free = 0
    for port in ports:
        try:
            _bound(interface, port)
            free += 1
        except _Taken:
            continue
        if free == processes:
            return
    raise ConfigError(
        f"{where!r} has {free} free ports, and the mesh some {processes} processes",
        fix="Take any port with HOST:*, a wider range with HOST:LOW-HIGH, or off",
    )


class _Taken(ConfigError):
    """Another process listens there."""


def _bound(interface: str, port: int) -> None:
    try:
        socket.create_server((interface.replace("*", "").strip("[]"), port)).close()
    except OSError as error:
        raise (_Taken if port else ConfigError)(
            f"no process can listen at {interface}:{port or '*'}: {error.strerror or error}",
            fix="Name an address of this host, as `ip address` lists them, or 127.0.0.1",
        ) from error
