"""Checks that a mesh can listen at its addresses: each one is bound and released."""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

import zmq

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.host.listen_addresses import (
    EPHEMERAL_PORTS,
    WILDCARD_HOSTS,
    AddressInUse,
    bind_error_type,
    format_host,
    parse_listen_address,
    parse_socket_host,
)
from meshrl.common.base.host.settings import METRICS_OFF
from meshrl.job.job_file import JobFile
from meshrl.launch.services import service_plan


def check_bind_address(job: JobFile) -> None:
    """Check that every process of the job's mesh finds a free port."""
    with job.locate_errors("mesh.bind"):
        require_bindable_endpoint(job.config.mesh.bind)


def check_metrics_ports(job: JobFile) -> None:
    """Check that every process of the job's mesh finds a free port for its metrics."""
    config = job.config
    # A worker and its role process each serve their own.
    processes = len(service_plan.plan_job_services(config)) + 2 * config.mesh.workers
    processes += config.rollout.shards + config.sandbox_count
    with job.locate_errors("mesh.metrics"):
        require_metrics_ports(config.mesh.metrics, processes)


def resolve_listen_endpoint(listen: str, advertise: str = "") -> str:
    """Return the endpoint, with this host's numeric address, for `--listen HOST[:LOW-HIGH]`. Other
    hosts reach the host's processes at it, or at the advertised name.

    Raises ConfigError.
    """
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]+))(?::([^:]+))?", listen)
    host = (found[1] or found[2]) if found else ""
    if found is None or (host in WILDCARD_HOSTS and not advertise):
        raise ConfigError(
            f"{listen!r} is not a single address by which other hosts reach this host",
            where="--listen",
            fix="Set an address or name of this host: HOST, [HOST] for IPv6, HOST:LOW-HIGH; "
            "or add --advertise NAME, the name by which they reach it",
        )
    address = f"[{host}]" if found[1] else resolve_host("0.0.0.0" if host == "*" else host)
    endpoint = f"tcp://{address}:{found[3] or '*'}"
    require_bindable_endpoint(endpoint)
    return endpoint


def resolve_host(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise NoRoute(
            f"the host name {host} does not resolve: {error}", where="--listen"
        ) from error


def find_local_address(endpoint: str) -> str:
    """Return the address of the interface by which this host reaches tcp://HOST:PORT.

    Sends nothing. Raises NoRoute.
    """
    at = urlsplit(endpoint)
    try:
        found = socket.getaddrinfo(at.hostname, at.port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return format_host(str(probe.getsockname()[0]))
    except (OSError, ValueError) as error:
        raise NoRoute(
            f"this host has no route to the head: {error}",
            where=endpoint,
            fix="Check that the name resolves and the network is up, or set the address by "
            "which others reach this host: --listen HOST",
        ) from error


def require_bindable_endpoint(endpoint: str, process_count: int = 2) -> None:
    """Raise ConfigError unless `process_count` processes can listen at `endpoint`,
    tcp://INTERFACE:PORTS.
    """
    interface, ports = parse_listen_address(endpoint, "mesh.bind")
    if len(ports) < process_count and ports != EPHEMERAL_PORTS:
        raise ConfigError(
            f"{endpoint!r} has one port, but a mesh has many processes",
            fix="Replace the port with *, or with a range, LOW-HIGH",
        )
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.ipv6 = interface.startswith("[")
        try:
            router.bind(f"tcp://{interface}:*")
        except zmq.ZMQError as error:
            raise ConfigError(
                f"processes cannot listen at {endpoint!r}: {error.strerror}",
                fix="Set an address of this host, as `ip address` lists them, or "
                '"tcp://127.0.0.1:*"',
            ) from error
    # Bulk bytes have a plain socket, which knows addresses and names, and no interfaces.
    _require_bindable(interface, 0)


def require_metrics_ports(address: str, process_count: int) -> None:
    """Raise ConfigError unless `address` (as `mesh.metrics`) has a free port for each process."""
    if address == METRICS_OFF:
        return
    interface, ports = parse_listen_address(address, "mesh.metrics")
    if ports == EPHEMERAL_PORTS:
        _require_bindable(interface, 0)
        return
    free = _count_free_ports(interface, ports, process_count)
    if free < process_count:
        raise (AddressInUse if len(ports) >= process_count else ConfigError)(
            f"{address!r} has {free} free ports, but the mesh has about {process_count} processes",
            fix="Set HOST:* for any port, a wider range HOST:LOW-HIGH, or off",
        )


def require_free_ports(endpoint: str, port_count: int) -> None:
    """Raise ConfigError unless the port range of `endpoint` has `port_count` free ports."""
    interface, ports = parse_listen_address(endpoint, "--listen")
    if ports == EPHEMERAL_PORTS:
        return
    free = _count_free_ports(interface, ports, port_count)
    if free < port_count:
        raise (AddressInUse if len(ports) >= port_count else ConfigError)(
            f"{free} of the {len(ports)} ports of {endpoint!r} are free, but this host's "
            f"processes need {port_count} with one job",
            where="--listen",
            fix="Set a wider range, HOST:LOW-HIGH with ports for more jobs, or any port: HOST",
        )


def _count_free_ports(interface: str, candidates: range, limit: int) -> int:
    """Return the number of free ports among the candidates, at most `limit`."""
    free = 0
    for port in candidates:
        try:
            _require_bindable(interface, port)
        except AddressInUse:
            continue
        free += 1
        if free == limit:
            break
    return free


class NoRoute(ConfigError):
    """Error raised when a name does not resolve now, or has no route."""

    code = "no_way"
    retryable = True


def _require_bindable(interface: str, port: int) -> None:
    try:
        host, family = parse_socket_host(interface)
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise bind_error_type(error)(
            f"processes cannot listen at {interface}:{port or '*'}: {error.strerror or error}",
            fix="Set an address of this host, as `ip address` lists them, or 127.0.0.1",
        ) from error
