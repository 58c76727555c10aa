"""Checks that a mesh can listen where it is to: addresses are bound and let go."""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

import zmq

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.host.ports import ANY, ANYWHERE, Taken, bare, ports, refused, shown
from meshrl.common.base.host.settings import OFF
from meshrl.job.loaded import JobFile
from meshrl.launch.services import plan


def bind(job: JobFile) -> None:
    """Every process of the job's mesh finds a port."""
    with job.naming("mesh.bind"):
        listens(job.config.mesh.bind)


def metrics(job: JobFile) -> None:
    """Every process of the job's mesh finds a port for its metrics."""
    config = job.config
    # A worker and its role process each serve their own.
    processes = len(plan.services_of(config)) + 2 * config.mesh.workers
    processes += config.rollout.shards + config.sandboxes
    with job.naming("mesh.metrics"):
        serves(config.mesh.metrics, processes)


def reachable(where: str, advertise: str = "") -> str:
    """The endpoint, with the address of this host in numbers, of `--listen HOST[:LOW-HIGH]`, by
    which other hosts reach its processes, or by what it advertises; ConfigError.
    """
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]+))(?::([^:]+))?", where)
    host = (found[1] or found[2]) if found else ""
    if found is None or (host in ANYWHERE and not advertise):
        raise ConfigError(
            f"{where!r} names no one address by which other hosts reach this one",
            where="--listen",
            fix="Write an address or a name of this host: HOST, [HOST] of IPv6, HOST:LOW-HIGH; or "
            "beside it --advertise NAME, by which they do",
        )
    address = f"[{host}]" if found[1] else resolved("0.0.0.0" if host == "*" else host)
    endpoint = f"tcp://{address}:{found[3] or '*'}"
    listens(endpoint)
    return endpoint


def resolved(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise NoWay(f"no host is called {host}: {error}", where="--listen") from error


def towards(endpoint: str) -> str:
    """The address of the interface by which this host reaches tcp://HOST:PORT. Nothing is sent.
    NoWay.
    """
    at = urlsplit(endpoint)
    try:
        found = socket.getaddrinfo(at.hostname, at.port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return shown(str(probe.getsockname()[0]))
    except (OSError, ValueError) as error:
        raise NoWay(
            f"this host has no way to the head: {error}",
            where=endpoint,
            fix="See whether the name resolves and the network is up, or name the address by "
            "which others reach this host: --listen HOST",
        ) from error


def listens(endpoint: str, processes: int = 2) -> None:
    """ConfigError unless `processes` can listen at `endpoint`, tcp://INTERFACE:PORTS."""
    interface, tried = ports(endpoint, "mesh.bind")
    if len(tried) < processes and tried != ANY:
        raise ConfigError(
            f"{endpoint!r} names one port, and a mesh has many processes",
            fix="Write * in place of the port, or a range, LOW-HIGH",
        )
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.ipv6 = interface.startswith("[")
        try:
            router.bind(f"tcp://{interface}:*")
        except zmq.ZMQError as error:
            raise ConfigError(
                f"no process can listen at {endpoint!r}: {error.strerror}",
                fix="Name an address of this host, as `ip address` lists them, or "
                '"tcp://127.0.0.1:*"',
            ) from error
    # Bulk bytes have a plain socket, which knows addresses and names, and no interfaces.
    _bound(interface, 0)


def serves(where: str, processes: int) -> None:
    """ConfigError unless `where`, as of `mesh.metrics`, has a free port for each process."""
    if where == OFF:
        return
    interface, tried = ports(where, "mesh.metrics")
    if tried == ANY:
        _bound(interface, 0)
        return
    free = _free(interface, tried, processes)
    if free < processes:
        raise (Taken if len(tried) >= processes else ConfigError)(
            f"{where!r} has {free} free ports, and the mesh some {processes} processes",
            fix="Take any port with HOST:*, a wider range with HOST:LOW-HIGH, or off",
        )


def room(endpoint: str, needed: int) -> None:
    """ConfigError unless a range of ports that a host listens at has as many free ones."""
    interface, tried = ports(endpoint, "--listen")
    if tried == ANY:
        return
    free = _free(interface, tried, needed)
    if free < needed:
        raise (Taken if len(tried) >= needed else ConfigError)(
            f"{free} of the {len(tried)} ports of {endpoint!r} are free, and this host's processes "
            f"take {needed} with one job",
            where="--listen",
            fix="Take a wider range, HOST:LOW-HIGH with some for more jobs, or any port: HOST",
        )


def _free(interface: str, tried: range, most: int) -> int:
    """How many of these ports are free, of so many that matter."""
    free = 0
    for port in tried:
        try:
            _bound(interface, port)
        except Taken:
            continue
        free += 1
        if free == most:
            break
    return free


class NoWay(ConfigError):
    """Nobody knows the name, or the way to it, now."""

    code = "no_way"
    retryable = True


def _bound(interface: str, port: int) -> None:
    try:
        host, family = bare(interface)
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise refused(error)(
            f"no process can listen at {interface}:{port or '*'}: {error.strerror or error}",
            fix="Name an address of this host, as `ip address` lists them, or 127.0.0.1",
        ) from error
