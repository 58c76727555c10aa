"""`meshrl token`: who else may hand jobs to a mesh; `meshrl secrets`: all that lets the parts of a
mesh know each other, made before any of it runs, for an orchestrator to hand out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from meshrl.common.base.errors import ConfigError, Refused
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.access import identity, records, tokens
from meshrl.common.mesh.access.records import FILE, HOST, PERSON, Token
from meshrl.common.mesh.access.ticket import GATEWAY_PORT, Ticket, named
from meshrl.common.mesh.transport.keys import KeyPair
from meshrl.directory.places import MeshPlace, find_head
from meshrl.launch.head import handed_out
from meshrl.launch.head.handed_out import HandedOut
from meshrl.launch.head.invitations import for_host, write
from meshrl.launch.redis.access import material
from meshrl.view.live import printing

DAY_S, HOUR_S = 86_400.0, 3600.0
GOOD = "good"


def create(name: str, days: float, priority: int, out: Path | None, mesh: Path | None) -> None:
    """Prints the token, or writes it to `out`, which must not be there."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]*", name):
        raise ConfigError(f"{name!r} is no name of a token", fix="Take letters, digits, . _ @ -")
    place = find_head(mesh)
    door = identity.existing(place.directory)
    _refuse_existing(out)
    at, lasts_s = (door.address, door.public), days * DAY_S
    token, ticket = tokens.made(name, lasts_s, time.time(), *at, priority)
    tokens.keep(_file(place), token)
    if _handed(ticket, out):
        print(f"{out} holds a token for {name}: meshrl submit JOB --token {out}")


def create_for_host(
    name: str | None, hours: float, uses: int, out: Path | None, mesh: Path | None
) -> None:
    """Makes a token that lets in so many hosts (0: any number), and prints it, or writes it to
    `out`. Refused for a mesh that is one host's.
    """
    place = find_head(mesh)
    if not MeshSettings.from_file(place.settings).joinable:
        raise Refused(
            "this mesh is one host's", fix="`meshrl up --listen HOST` starts one for several"
        )
    _refuse_existing(out)
    if _handed(for_host(place, name, hours * HOUR_S, uses), out):
        whom = {0: "any number of hosts", 1: "one host"}.get(uses, f"{uses} hosts")
        print(f"{out} lets in {whom}: copy it there; meshrl join {out.name if out else ''}")


def _refuse_existing(out: Path | None) -> None:
    if out is not None and out.exists():
        raise Refused(f"{out} is there already", fix="Take another file")


def _handed(ticket: Ticket, out: Path | None) -> bool:
    """Prints it, or writes it to `out`; whether it was written."""
    if out is None:
        print(ticket.text)
        return False
    write(ticket, out)
    return True


def show(mesh: Path | None, as_json: bool) -> None:
    """Prints what is known of the tokens."""
    known, now_s = records.read(_file(find_head(mesh))).tokens, time.time()
    if as_json:
        about = [asdict(token) | {"good": _how(token, now_s) == GOOD} for token in known]
        print(json.dumps([{k: v for k, v in told.items() if k != "key"} for told in about]))
        return
    table = printing.table("token", "for", "made", "expires", "priority", "hosts", "", wraps=False)
    for token in known:
        dates = _date(token.made_s), _date(token.expires_s)
        of_host = token.kind == HOST
        hosts = f"{token.used} of {token.uses or 'any'}" if of_host else ""  # that it has let in
        priority = "" if of_host else str(token.priority)
        table.add_row(token.id, token.name, *dates, priority, hosts, _how(token, now_s))
    printing.show(table)


def revoke(which: str, mesh: Path | None) -> None:
    """Says how many are good no more."""
    revoked = tokens.revoke(_file(find_head(mesh)), which, time.time())
    of_hosts = any(token.kind == HOST for token in revoked)
    stays = (
        "hosts that it has let in stay" if of_hosts else "jobs that were handed in with it go on"
    )
    print(f"revoked {len(revoked)} of {which}; {stays}")


def _file(place: MeshPlace) -> Path:
    return place.directory / FILE


def _date(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).strftime("%Y-%m-%d %H:%M")


def _how(token: Token, now_s: float) -> str:
    if token.revoked_s:
        return f"revoked {_date(token.revoked_s)}"
    if token.spent:
        return f"used by {token.host}" if token.uses == 1 else "used"
    return GOOD if token.good(now_s) else "expired"


REDIS_PORT = 6379
JOIN, SUBMIT, REDIS = "join.token", "submit.token", "redis"


def make_secrets(directory: Path, head: str, exposed: str, redis: str, days: float) -> None:
    """Makes the directory, whole or not at all, and says what is in it. Refused where there is one;
    ConfigError for a NAME[:PORT] that is none.
    """
    near = named(head, GATEWAY_PORT, "--head")
    far = named(exposed, GATEWAY_PORT, "--exposed")
    at = urlsplit(named(redis, REDIS_PORT, "--redis")) if redis else None
    if os.path.lexists(directory):
        raise Refused(
            f"{directory} is there already, and what is in it may be in use",
            fix="Name another directory: secrets that are made again are another mesh's",
        )
    fresh = directory.with_name(f".{directory.name}.{os.getpid()}")
    fresh.mkdir(parents=True, mode=0o700)
    try:
        pair, now_s, lasts_s = KeyPair.new(), time.time(), days * DAY_S
        gateway = pair.public.decode()
        host, joining = tokens.made(JOIN, lasts_s, now_s, near, gateway, kind=HOST, uses=0)
        person, submitting = tokens.made(SUBMIT, lasts_s, now_s, far, gateway, kind=PERSON)
        handed = HandedOut(gateway, pair.secret.decode(), [host, person])
        handed.write(fresh / handed_out.FILE)
        write(joining, fresh / JOIN)
        write(submitting, fresh / SUBMIT)
        if at is not None:
            (fresh / REDIS).mkdir(mode=0o700)
            now = datetime.now(UTC)
            netloc = at.netloc.rpartition(":")
            material.make(fresh / REDIS, netloc[0], int(netloc[2]), now)
        fresh.rename(directory)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    print(f"{directory} holds the secrets of a mesh, for your eyes alone:")
    print(f"  {handed_out.FILE}    for its head: meshrl up --secrets {handed_out.FILE}")
    print(f"  {JOIN}   for hosts, any number, for {days:g} days: meshrl join {JOIN}")
    print(f"  {SUBMIT} for people who hand in jobs: meshrl submit JOB --token {SUBMIT}")
    if at is not None:
        print(f"  {REDIS}/       for its Redis, and for the head: MESHRL_REDIS_URL=./{REDIS}/url")
