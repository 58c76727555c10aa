"""`meshrl token`: who else may hand jobs to a mesh."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from common.base.errors import ConfigError, Refused
from common.base.host.settings import MeshSettings
from common.mesh.access import identity, records, tokens
from common.mesh.access.records import FILE, HOST, Token
from common.mesh.access.ticket import Ticket
from meshrl.directory.places import MeshPlace, find_mesh
from meshrl.launch.head.invitations import for_host, write
from meshrl.view.live import printing

DAY_S, HOUR_S = 86_400.0, 3600.0
GOOD = "good"


def create(name: str, days: float, priority: int, out: Path | None, mesh: Path | None) -> None:
    """Prints the token, or writes it to `out`, which must not be there."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]*", name):
        raise ConfigError(f"{name!r} is no name of a token", fix="Take letters, digits, . _ @ -")
    place = _head(mesh)
    door = identity.existing(place.directory)
    if out is not None and out.exists():
        raise Refused(f"{out} is there already", fix="Take another file")
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
    place = _head(mesh)
    if not MeshSettings.from_file(place.settings).joinable:
        raise Refused(
            "this mesh is one host's", fix="`meshrl up --listen HOST` starts one for several"
        )
    if out is not None and out.exists():
        raise Refused(f"{out} is there already", fix="Take another file")
    if _handed(for_host(place, name, hours * HOUR_S, uses), out):
        whom = {0: "any number of hosts", 1: "one host"}.get(uses, f"{uses} hosts")
        print(f"{out} lets in {whom}: copy it there; meshrl join {out.name if out else ''}")


def _handed(ticket: Ticket, out: Path | None) -> bool:
    """Prints it, or writes it to `out`; whether it was written."""
    if out is None:
        print(ticket.text)
        return False
    write(ticket, out)
    return True


def show(mesh: Path | None, as_json: bool) -> None:
    """Prints what is known of the tokens."""
    known, now_s = records.read(_file(_head(mesh))).tokens, time.time()
    if as_json:
        about = [asdict(token) | {"good": _how(token, now_s) == GOOD} for token in known]
        print(json.dumps([{k: v for k, v in told.items() if k != "key"} for told in about]))
        return
    table = printing.table("token", "for", "made", "expires", "priority", "hosts", "", wraps=False)
    for token in known:
        dates = _date(token.made_s), _date(token.expires_s)
        priority, hosts = ("", _hosts(token)) if token.kind == HOST else (str(token.priority), "")
        table.add_row(token.id, token.name, *dates, priority, hosts, _how(token, now_s))
    printing.show(table)


def revoke(which: str, mesh: Path | None) -> None:
    """Says how many are good no more."""
    revoked = tokens.revoke(_file(_head(mesh)), which, time.time())
    of_hosts = any(token.kind == HOST for token in revoked)
    stays = (
        "hosts that it has let in stay" if of_hosts else "jobs that were handed in with it go on"
    )
    print(f"revoked {len(revoked)} of {which}; {stays}")


def _head(mesh: Path | None) -> MeshPlace:
    """The mesh that is meant, whose tokens are known here."""
    place = find_mesh(mesh)
    place.refuse_joined()
    return place


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


def _hosts(token: Token) -> str:
    """How many it has let in, of how many it may."""
    return f"{token.used} of {token.uses or 'any'}"
