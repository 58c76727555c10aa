"""`meshrl join`: this host gives its accelerators to a mesh, from now on or again."""

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
from meshrl.common.base.host.interfaces import address_of, interface_behind
from meshrl.common.base.host.settings import MeshSettings, advertised_host
from meshrl.common.base.release import release
from meshrl.common.base.urls import Url
from meshrl.common.mesh.access import ticket
from meshrl.common.mesh.access.line import Line
from meshrl.common.mesh.access.ticket import BEGINS, GATEWAY_PORT, LONGEST, Ticket, named
from meshrl.common.state.pool.placing import taking
from meshrl.directory import places, user
from meshrl.directory.ownership import made_private
from meshrl.directory.places import MeshPlace, running_launcher
from meshrl.job.checks.machine import devices
from meshrl.launch import background
from meshrl.launch.background import RootProgram
from meshrl.launch.checks import addresses
from meshrl.launch.console import console
from meshrl.launch.foreground import point_to
from meshrl.launch.holding import DirectoryHeld
from meshrl.launch.hosts import hosting, membership
from meshrl.launch.hosts.hosting import HostShape
from meshrl.launch.hosts.membership import AUTHORITY, Membership, gateway_line
from meshrl.launch.hosts.returning import MARKETS, Offer, as_told
from meshrl.launch.services import plan

JOIN_ENV = "MESHRL_JOIN"  # the text of a token, or where it is
LOCAL = ("localhost", "127.0.0.1", "::1")
# Of fsspec's, those by which nobody on the way reads what comes.
PRIVATE = ("abfs", "abfss", "adl", "az", "file", "gcs", "gs", "https", "s3", "s3a", "sftp", "ssh")


def found(given: str | None) -> Ticket:
    """The ticket in a file, at a URL, in the standard input (`-`), or in $MESHRL_JOIN: a secret, so
    never on a command line. ConfigError says what is wrong with it, NotFound that there is none.
    """
    if given is not None and given.strip().startswith(BEGINS):
        raise ConfigError(
            "a token on a command line is seen by everybody on this host, and in its history",
            fix=f"Put it into a file (chmod 600), or ${JOIN_ENV}, or pipe it to `meshrl join -`",
        )
    told = given or os.environ.get(JOIN_ENV, "")
    if not told:
        raise NotFound(
            "no token to join with was given",
            fix="Copy mesh/join.token of the head here, or make one there with `meshrl token "
            "create --host`; then `meshrl join FILE`",
        )
    if told == "-":
        return ticket.read(_a_token(sys.stdin.read(LONGEST), "the standard input"))
    if "://" in told:
        return ticket.read(_a_token(_fetched(told), told))
    return ticket.read(told)


def _fetched(url: str) -> str:
    import fsspec

    at = Url.of(url)
    near, scheme = at.scheme == "http" and at.hostname in LOCAL, url.partition("://")[0]
    if scheme not in PRIVATE and not near:  # nor is a chain of fsspec's, as zip://*::http://HOST
        raise ConfigError(
            f"a token is a secret, and {scheme}:// shows it to the network, or may",
            fix=f"https, or one of {', '.join(PRIVATE)}",
        )
    try:
        files, path = fsspec.core.url_to_fs(url)  # `fsspec.open` takes a ? for a pattern
        with files.open(path, "rb") as file:
            content: bytes = file.read(LONGEST)
            return content.decode()
    except (OSError, ValueError, ImportError, UnicodeDecodeError) as error:
        told = Url.of(url)
        said = told.hide(str(error))
        raise ConfigError(f"no token can be read there: {said}", where=told.place) from None


def _a_token(text: str, where: str) -> str:
    if not text.strip().startswith(BEGINS):
        raise ConfigError(
            f"what is there is no token, which begins with {BEGINS}", where=Url.of(where).place
        )
    return text


T = TypeVar("T")

LOG = "hosting"  # of the root process
PROGRAM = RootProgram(
    "meshrl.launch.hosts.hosting", LOG, 120.0, "this host's part did not start", "it is not up"
)


def join(
    given: str | None,
    root: Path | None,
    offer: Offer,
    foreground: bool,
    head: str = "",
    health: str = "",
    drain_s: float = 0.0,
) -> int:
    """Joins, or comes back where it had joined before; with `foreground` it returns when this
    host's part of the mesh has ended, with its exit status. `head`: NAME[:PORT] by which this host
    reaches the gateway from now on; empty: as the token says, or as it did before. `health`:
    HOST:PORT, where the host as a whole is asked how it is; empty: nowhere. `drain_s`: with
    `foreground` it drains for so long when it is told to end.
    """
    began_s = time.time()
    place = MeshPlace((root or places.home()).absolute())
    user.settle(place.home)
    if foreground:
        console.begin(place, LOG)
    if offer.interface and not address_of(offer.interface):
        raise ConfigError(
            f"no interface {offer.interface} with an address",
            where="--interface",
            fix="Take one that `ip address` shows with an address",
        )
    known = membership.known(place)
    if place.settings.is_file() and known is None:
        raise Refused(
            f"{place.root} is the head of a mesh of its own", fix="Name another directory: --root"
        )
    if running_launcher(place):
        host = known.host if known is not None else "a host"
        raise DirectoryHeld(
            f"{host} runs in {place.root} already, and is in its mesh",
            fix="`meshrl leave` ends that; --root DIR joins as another host",
        )
    devices.usable(offer.device, offer.workers)
    if offer.market not in MARKETS:
        raise ConfigError(f"{offer.market!r} is no market", fix=f"Take one of {', '.join(MARKETS)}")
    if known is not None and offer.ephemeral and (given or os.environ.get(JOIN_ENV)):
        known = standing(place, known.at(_elsewhere(head, known.address)))
    if known is not None and place.settings.is_file():
        back = HostShape.of(place)
        if (now := replace(known.at(_elsewhere(head, known.address)), invitation="")) != known:
            now.write(place)
        if head:
            _ask_anew(place, now)
        _write_where(place, now, back, offer)
        print(f"{known.host} comes back", flush=True)
    else:
        back = None
        _become_member(place, _invited(known, given, head), offer, began_s)
    point_to(place)
    os.environ.pop(JOIN_ENV, None)  # nothing that runs here needs the token
    if foreground:
        return asyncio.run(hosting.serve(place.root, health, drain_s))
    background.start(PROGRAM, place, "--health", health)
    took = "" if back is not None else f" in {time.time() - began_s:.1f} s"
    host = MeshSettings.from_file(place.settings).host
    print(f"{host} is in the mesh{took}; `meshrl leave` ends that")
    return 0


def standing(place: MeshPlace, known: Membership) -> Membership | None:
    """`known`, or None when the mesh has forgotten that host: then so does the host, to join as
    another. A container that is started again finds what it wrote before, however long it was away.
    """
    if not place.settings.is_file():
        return known  # it has not been answered yet
    try:
        at_gateway(known.ticket, lambda line: line.call(Gateway.membership, None))
    except NotAllowed:
        print(f"the mesh knows {known.host} no more", flush=True)
        membership.forget(place)
        return None
    return known


def _invited(begun: Membership | None, given: str | None, head: str) -> Membership:
    """By the token of a try that was interrupted, unless another one is given."""
    if begun is not None and given is None and not os.environ.get(JOIN_ENV):
        return begun.at(_elsewhere(head, begun.address))
    token = found(given)
    same = begun is not None and begun.invitation == token.secret
    member = begun if begun is not None and same else Membership.new(token)
    return member.at(_elsewhere(head, token.address))


def _elsewhere(head: str, address: str) -> str:
    """The address of --head, whose port is by default that of `address`; empty: none was named."""
    port = urlsplit(address).port or GATEWAY_PORT
    return named(head, port, "--head") if head else ""


def _become_member(place: MeshPlace, member: Membership, offer: Offer, began_s: float) -> None:
    """Asks the gateway to let this host in, and writes what it is told. Its name and its own key
    are written first: asked again after an interruption, the mesh knows them.
    """
    ticket = member.token
    bind = _bind(ticket, offer.listen, offer.advertise, offer.workers)
    made_private(place.directory)
    member.write(place)
    address = advertised_host(offer.advertise or bind)
    print(f"asks the mesh at {ticket.address} to let this host in", flush=True)
    about = (address, offer.workers, offer.standby, release(), offer.ephemeral)
    request = JoinHost(member.host, member.public, *about)
    try:
        told = at_gateway(ticket, lambda line: line.call(Gateway.join, request))
    except (Refused, NotAllowed, ConfigError):
        place.membership.unlink()
        raise
    _write(place, member, bind, offer, told, began_s)
    replace(member, invitation="").write(place)


def _write(
    place: MeshPlace,
    member: Membership,
    bind: str,
    offer: Offer,
    told: HostAdmitted,
    began_s: float,
) -> None:
    shape = HostShape(
        workers=offer.workers,
        device=offer.device,
        prefix=told.prefix,
        planner=told.planner,
        listen=offer.listen,
        ephemeral=offer.ephemeral,
        takes=taking.ALL if offer.takes is None else offer.takes,
        asked_s=began_s,
        **dict(offer.of_shape.values()),
    )
    shape.write(place)
    settings = MeshSettings(
        redis_url=told.redis_url,
        run_root=str(place.root),
        bind=bind,
        host=member.host,
        secret=told.secret,
        joinable=True,
        authority=_authority_in(place, told.authority),
        advertise=offer.advertise,
        interface=offer.interface or interface_behind(bind, offer.advertise),
        **dict(offer.of_settings.values()),
    )
    replace(settings, **_shared(told.settings)).to_file(place.settings)


def _write_where(place: MeshPlace, member: Membership, shape: HostShape, offer: Offer) -> None:
    """Takes what the command was told, and works out anew where this host is reached: a container
    has another address at each start.
    """
    shape, settings, kept = as_told(shape, MeshSettings.from_file(place.settings), offer)
    if kept:
        print(
            f"{member.host} stays what it joined as: {', '.join(kept)}. For something else "
            "`meshrl leave` first, then join with a new token",
            flush=True,
        )
    listen, advertise = offer.listen or shape.listen, offer.advertise or settings.advertise
    bind = _bind(member.ticket, listen, advertise, shape.workers)
    replace(shape, listen=listen).write(place)
    interface = offer.interface or interface_behind(bind, advertise) or settings.interface
    replace(settings, bind=bind, advertise=advertise, interface=interface).to_file(place.settings)


def _bind(ticket: Ticket, listen: str, advertise: str, workers: int) -> str:
    """Where the processes of this host listen, which has room for them. ConfigError."""
    bind = addresses.reachable(listen or addresses.towards(ticket.address), advertise)
    addresses.room(bind, plan.ports_of_host(max(1, workers)))
    return bind


def _ask_anew(place: MeshPlace, member: Membership) -> None:
    """Where Redis is may have changed with the head."""
    print(f"asks the mesh at {member.address} where it is now", flush=True)
    asked = None
    try:
        told = at_gateway(member.ticket, lambda line: line.call(Gateway.whereabouts, asked))
    except NotAllowed as error:
        raise hosting.expelled(member.host) from error
    write_location(place, told)


def write_location(place: MeshPlace, told: RedisLocation) -> None:
    """Puts what was told anew into the settings of a host that comes back."""
    authority = _authority_in(place, told.authority)
    before = MeshSettings.from_file(place.settings)
    now = replace(before, redis_url=told.redis_url, authority=authority)
    replace(now, **_shared(told.settings)).to_file(place.settings)


def _authority_in(place: MeshPlace, authority: str) -> str:
    """The file of the certificate that Redis' is signed with; empty: there is none."""
    path = place.directory / AUTHORITY
    if authority:
        path.write_text(authority)
    return str(path) if authority else ""


def _shared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings that all hosts share which this version knows."""
    known = MeshSettings.__dataclass_fields__
    return {name: value for name, value in settings.items() if name in known}


def at_gateway(ticket: Ticket, question: Callable[[Line], Awaitable[T]]) -> T:
    """What the gateway of a mesh answers to the holder of a token."""

    async def asking() -> T:
        async with gateway_line(ticket) as line:
            return await question(line)

    return asyncio.run(asking())
