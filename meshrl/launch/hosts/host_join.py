"""`meshrl join`: a host offers its accelerators to a mesh, for the first time or again."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from meshrl.common.api.gateway import Gateway, HostAdmitted, JoinHost, RedisLocation
from meshrl.common.base.errors import ConfigError, NotAllowed, NotFound, Refused
from meshrl.common.base.host.interfaces import find_address, find_bind_interface
from meshrl.common.base.host.settings import MeshSettings, parse_advertised_host
from meshrl.common.base.release import read_release
from meshrl.common.base.urls import Url
from meshrl.common.mesh.access import access_token
from meshrl.common.mesh.access.access_token import (
    GATEWAY_PORT,
    MAX_FILE_CHARS,
    TOKEN_PREFIX,
    AccessToken,
    parse_gateway_address,
)
from meshrl.common.mesh.access.gateway_connection import GatewayConnection
from meshrl.common.state.pool.scheduling import host_services
from meshrl.common.state.pool.workers.rows import MARKETS, check_price
from meshrl.directory import directory_paths, process_user
from meshrl.directory.directory_paths import MeshPaths, find_root_pid
from meshrl.directory.file_ownership import create_private_directory
from meshrl.job.checks.host import devices
from meshrl.launch import root_program
from meshrl.launch.checks import address_checks
from meshrl.launch.console import log_printer
from meshrl.launch.directory_lock import DirectoryLocked
from meshrl.launch.foreground import set_current_mesh
from meshrl.launch.hosts import host_launcher, membership
from meshrl.launch.hosts.host_launcher import HostShape
from meshrl.launch.hosts.host_offer import HostOffer, apply_offer
from meshrl.launch.hosts.membership import CA_FILE_NAME, Membership, connect_gateway
from meshrl.launch.hosts.preemption_notices import parse_notice_source
from meshrl.launch.root_program import RootProgram
from meshrl.launch.services import service_plan

JOIN_ENV = "MESHRL_JOIN"  # the text of a token, or its path or URL
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
# Protocols of fsspec that encrypt what they fetch.
PRIVATE_SCHEMES = (
    "abfs",
    "abfss",
    "adl",
    "az",
    "file",
    "gcs",
    "gs",
    "https",
    "s3",
    "s3a",
    "sftp",
    "ssh",
)


def read_join_token(source: str | None) -> AccessToken:
    """Return the token from a file, a URL, the standard input (`-`), or $MESHRL_JOIN.

    A token is a secret and never on a command line. Raises ConfigError for an invalid one, NotFound
    for none.
    """
    if source is not None and source.strip().startswith(TOKEN_PREFIX):
        raise ConfigError(
            "a token on a command line is visible to all users of this host, and in the shell "
            "history",
            fix=f"Write it to a file (chmod 600), set ${JOIN_ENV}, or pipe it to `meshrl join -`",
        )
    location = source or os.environ.get(JOIN_ENV, "")
    if not location:
        raise NotFound(
            "no join token was given",
            fix="Copy mesh/join.token of the head here, or create one there with `meshrl "
            "token create --host`; then run `meshrl join FILE`",
        )
    if location == "-":
        return access_token.read_token(
            _require_token(sys.stdin.read(MAX_FILE_CHARS), "the standard input")
        )
    if "://" in location:
        return access_token.read_token(_require_token(_fetch_token(location), location))
    return access_token.read_token(location)


def _fetch_token(url: str) -> str:
    import fsspec

    at = Url.parse(url)
    is_local, scheme = at.scheme == "http" and at.hostname in LOCAL_HOSTS, url.partition("://")[0]
    # nor is a chain of fsspec's, as zip://*::http://HOST
    if scheme not in PRIVATE_SCHEMES and not is_local:
        raise ConfigError(
            f"a token is a secret, which {scheme}:// can expose to the network",
            fix=f"Use https, or one of {', '.join(PRIVATE_SCHEMES)}",
        )
    try:
        files, path = fsspec.core.url_to_fs(url)  # `fsspec.open` takes a ? for a pattern
        with files.open(path, "rb") as file:
            content: bytes = file.read(MAX_FILE_CHARS)
            return content.decode()
    except (OSError, ValueError, ImportError, UnicodeDecodeError) as error:
        parsed_url = Url.parse(url)
        message = parsed_url.redact(str(error))
        raise ConfigError(
            f"reading the token failed: {message}", where=parsed_url.public_url
        ) from None


def _require_token(text: str, source: str) -> str:
    if not text.strip().startswith(TOKEN_PREFIX):
        raise ConfigError(
            f"the content is not a token: a token begins with {TOKEN_PREFIX}",
            where=Url.parse(source).public_url,
        )
    return text


T = TypeVar("T")

LOG_NAME = "hosting"  # log of the root process
HOST_PROGRAM = RootProgram(
    "meshrl.launch.hosts.host_launcher",
    LOG_NAME,
    120.0,
    "the mesh processes of this host did not start",
    "the mesh processes of this host are not ready",
)


def join_mesh(
    token_source: str | None,
    root: Path | None,
    offer: HostOffer,
    foreground: bool,
    head_address: str = "",
    health_address: str = "",
    drain_timeout_s: float = 0.0,
) -> int:
    """Join a mesh, or return to the one joined before.

    With `foreground` it returns when this host's part of the mesh has ended, with its exit status.
    `head_address`: NAME[:PORT] by which this host reaches the gateway from now on; empty: as the
    token states, or as before. `health_address`: HOST:PORT, where the host answers health
    requests; empty: nowhere. `drain_timeout_s`: with `foreground` it drains for so long after its
    stop order.
    """
    began_s = time.time()
    place = MeshPaths((root or directory_paths.find_mesh_home()).absolute())
    process_user.ensure_home(place.process_home)
    if foreground:
        log_printer.start_printing(place, LOG_NAME)
    if offer.interface and not find_address(offer.interface):
        raise ConfigError(
            f"interface {offer.interface} does not exist or has no address",
            where="--interface",
            fix="Set one that `ip address` lists with an address",
        )
    known = membership.read_membership(place)
    if place.settings.is_file() and known is None:
        raise Refused(
            f"{place.root} belongs to the head of another mesh", fix="Set another directory: --root"
        )
    if find_root_pid(place):
        host = known.host if known is not None else "a host"
        raise DirectoryLocked(
            f"{host} already runs in {place.root} and is in its mesh",
            fix="Run `meshrl leave` first, or join as another host with --root DIR",
        )
    devices.find_usable_devices(offer.device, offer.workers)
    if offer.market not in MARKETS:
        raise ConfigError(
            f"{offer.market!r} is not a market", fix=f"Set one of {', '.join(MARKETS)}"
        )
    check_price(offer.price)
    if offer.notice_source:
        parse_notice_source(offer.notice_source)
    if known is not None and offer.ephemeral and (token_source or os.environ.get(JOIN_ENV)):
        known = drop_stale_membership(
            place, known.with_address(_resolve_head_address(head_address, known.address))
        )
    if known is not None and place.settings.is_file():
        back = HostShape.read(place)
        if (
            now := replace(
                known.with_address(_resolve_head_address(head_address, known.address)),
                invitation_secret="",
            )
        ) != known:
            now.write(place)
        if head_address:
            _refresh_location(place, now)
        _update_addresses(place, now, back, offer)
        print(f"{known.host} rejoins its mesh", flush=True)
    else:
        back = None
        _request_membership(
            place, _choose_membership(known, token_source, head_address), offer, began_s
        )
    set_current_mesh(place)
    os.environ.pop(JOIN_ENV, None)  # no process here needs the token
    if foreground:
        return asyncio.run(host_launcher.serve_host(place.root, health_address, drain_timeout_s))
    root_program.start_in_background(HOST_PROGRAM, place, "--health", health_address)
    took = "" if back is not None else f" in {time.time() - began_s:.1f} s"
    host = MeshSettings.from_file(place.settings).host
    print(f"{host} has joined the mesh{took}; run `meshrl leave` to leave it")
    return 0


def drop_stale_membership(mesh_paths: MeshPaths, member: Membership) -> Membership | None:
    """Return `member`, or None if the mesh has forgotten that host; then drop its files.

    It joins as another host. A container that restarts finds what it wrote before, however long it
    was away.
    """
    if not mesh_paths.settings.is_file():
        return member  # the request has no answer yet
    try:
        call_gateway(member.member_token, lambda line: line.call(Gateway.membership, None))
    except NotAllowed:
        print(f"the mesh has removed {member.host}: this host joins under a new name", flush=True)
        membership.delete_membership(mesh_paths)
        return None
    return member


def _choose_membership(
    pending: Membership | None, token_source: str | None, head_address: str
) -> Membership:
    """Return the membership of an interrupted attempt, unless another token is given."""
    if pending is not None and token_source is None and not os.environ.get(JOIN_ENV):
        return pending.with_address(_resolve_head_address(head_address, pending.address))
    token = read_join_token(token_source)
    same = pending is not None and pending.invitation_secret == token.secret
    member = pending if pending is not None and same else Membership.create(token)
    return member.with_address(_resolve_head_address(head_address, token.address))


def _resolve_head_address(head_address: str, address: str) -> str:
    """Return the address of --head, by default with the port of `address`; empty for no --head."""
    port = urlsplit(address).port or GATEWAY_PORT
    return parse_gateway_address(head_address, port, "--head") if head_address else ""


def _request_membership(
    mesh_paths: MeshPaths, member: Membership, offer: HostOffer, started_s: float
) -> None:
    """Request admission from the gateway, and write its answer.

    The host's name and own key are written first, so that the mesh recognizes them in a repeat
    after an interruption.
    """
    ticket = member.invitation_token
    bind = _choose_bind_endpoint(ticket, offer.listen, offer.advertise, offer.workers)
    create_private_directory(mesh_paths.directory)
    member.write(mesh_paths)
    address = parse_advertised_host(offer.advertise or bind)
    print(f"requesting admission from the mesh at {ticket.address}", flush=True)
    about = (address, offer.workers, offer.accepts_standby, read_release(), offer.ephemeral)
    request = JoinHost(member.host, member.public_key, *about)
    try:
        answer = call_gateway(ticket, lambda line: line.call(Gateway.join, request))
    except (Refused, NotAllowed, ConfigError):
        mesh_paths.membership.unlink()
        raise
    _write_configuration(mesh_paths, member, bind, offer, answer, started_s)
    replace(member, invitation_secret="").write(mesh_paths)


def _write_configuration(
    mesh_paths: MeshPaths,
    member: Membership,
    bind: str,
    offer: HostOffer,
    admission: HostAdmitted,
    started_s: float,
) -> None:
    shape = HostShape(
        workers=offer.workers,
        device=offer.device,
        worker_prefix=admission.worker_prefix,
        planner_name=admission.planner,
        listen=offer.listen,
        ephemeral=offer.ephemeral,
        accepted_services=host_services.ALL_SERVICES
        if offer.accepted_services is None
        else offer.accepted_services,
        join_requested_s=started_s,
        **dict(offer.shape_fields.values()),
    )
    shape.write(mesh_paths)
    settings = MeshSettings(
        redis_url=admission.redis_url,
        run_root=str(mesh_paths.root),
        bind=bind,
        host=member.host,
        secret=admission.secret,
        joinable=True,
        authority=_write_ca_file(mesh_paths, admission.ca_pem),
        advertise=offer.advertise,
        interface=offer.interface or find_bind_interface(bind, offer.advertise),
        **dict(offer.settings_fields.values()),
    )
    replace(settings, **_filter_known_settings(admission.settings)).to_file(mesh_paths.settings)


def _update_addresses(
    mesh_paths: MeshPaths, member: Membership, shape: HostShape, offer: HostOffer
) -> None:
    """Apply the command's options and resolve this host's addresses again. A container has another
    address at each start.
    """
    shape, settings, retained_options = apply_offer(
        shape, MeshSettings.from_file(mesh_paths.settings), offer
    )
    if retained_options:
        print(
            f"{member.host} keeps the options of its first join: {', '.join(retained_options)}. To "
            "change them, run `meshrl leave`, then join with a new token",
            flush=True,
        )
    listen, advertise = offer.listen or shape.listen, offer.advertise or settings.advertise
    bind = _choose_bind_endpoint(member.member_token, listen, advertise, shape.workers)
    replace(shape, listen=listen).write(mesh_paths)
    interface = offer.interface or find_bind_interface(bind, advertise) or settings.interface
    replace(settings, bind=bind, advertise=advertise, interface=interface).to_file(
        mesh_paths.settings
    )


def _choose_bind_endpoint(token: AccessToken, listen: str, advertise: str, workers: int) -> str:
    """Return the endpoint of this host's processes, with enough ports. Raises ConfigError."""
    bind = address_checks.resolve_listen_endpoint(
        listen or address_checks.find_local_address(token.address), advertise
    )
    address_checks.require_free_ports(bind, service_plan.count_host_ports(max(1, workers)))
    return bind


def _refresh_location(mesh_paths: MeshPaths, member: Membership) -> None:
    """Fetch the location of Redis, which may have changed with the head."""
    print(f"requesting the current location of Redis from the mesh at {member.address}", flush=True)
    request = None
    try:
        redis_location = call_gateway(
            member.member_token, lambda line: line.call(Gateway.whereabouts, request)
        )
    except NotAllowed as error:
        raise host_launcher.make_expelled_error(member.host) from error
    write_location(mesh_paths, redis_location)


def write_location(mesh_paths: MeshPaths, location: RedisLocation) -> None:
    """Write the new location to the settings of a returning host."""
    authority = _write_ca_file(mesh_paths, location.ca_pem)
    before = MeshSettings.from_file(mesh_paths.settings)
    now = replace(before, redis_url=location.redis_url, authority=authority)
    replace(now, **_filter_known_settings(location.settings)).to_file(mesh_paths.settings)


def _write_ca_file(mesh_paths: MeshPaths, ca_pem: str) -> str:
    """Write the certificate that signs Redis', and return its path; empty: there is none."""
    path = mesh_paths.directory / CA_FILE_NAME
    if ca_pem:
        path.write_text(ca_pem)
    return str(path) if ca_pem else ""


def _filter_known_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shared settings that this version knows."""
    known = MeshSettings.__dataclass_fields__
    return {name: value for name, value in settings.items() if name in known}


def call_gateway(token: AccessToken, request: Callable[[GatewayConnection], Awaitable[T]]) -> T:
    """Return the gateway's answer to the holder of a token."""

    async def run_request() -> T:
        async with connect_gateway(token) as line:
            return await request(line)

    return asyncio.run(run_request())
