"""`meshrl keys`: whose keys a mesh lets in, and those that it lets in no more."""

from __future__ import annotations

import json
import re
import time
import uuid
from dataclasses import asdict
from functools import partial
from pathlib import Path

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import NotFound, Refused
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.access import records
from meshrl.common.state.hosts import admission, doors
from meshrl.common.state.redis.client import State
from meshrl.directory.asking import ANSWER_S, ask
from meshrl.directory.joined import joined_hosts
from meshrl.directory.places import MeshPlace, find_head
from meshrl.view.live import printing

EXPEL_S = 20.0
WHOLE = 64  # hexadecimal digits of a key
KEY = f"[0-9a-f]{{8,{WHOLE}}}"  # or how one begins


def show(mesh: Path | None, as_json: bool) -> None:
    """Prints the keys that are let in."""
    place = find_head(mesh)
    found = ask(place, doors.rows, ANSWER_S)
    if as_json:
        print(json.dumps([asdict(row) for row in found]))
        return
    table = printing.table("host", "role", "process", "key", wraps=False)
    for row in found:
        table.add_row(row.host, row.role, row.name, row.public)
    printing.show(table)


def revoke(which: str, mesh: Path | None) -> None:
    """Lets a host, or one key, in no more."""
    place = find_head(mesh)
    begins = re.fullmatch(KEY, which.lower().removesuffix("...").removesuffix("…"))
    if begins and not _named(place, which):
        public, whose = ask(place, partial(_key, begins=begins[0]), ANSWER_S)
        if not ask(place, lambda state: doors.revoke_key(state, public), ANSWER_S):
            raise Refused("this key was revoked before")
        print(
            f"the key {public[:8]}{whose} is revoked; its process is let in again with a new one "
            "when it starts again"
        )
        return
    host = _joined(place, which)

    async def expelled(state: State) -> None:
        op, about, within_s = uuid.uuid4().hex, {"host": host}, EXPEL_S - ANSWER_S
        await admission.ask(state, SystemClock(), op, admission.LEAVE, about, within_s)

    token = _still_good(records.read(place.directory / records.FILE), host, time.time())
    ask(place, expelled, EXPEL_S)
    print(f"{host} is let in no more, and what runs there is cut off; it may join with a new token")
    if token:
        print(
            f"the token {token}, by which it came, lets in others, and it again: "
            f"`meshrl token revoke {token}` ends that"
        )


def _still_good(known: records.KnownHolders, host: str, now_s: float) -> str:
    """The name of the token that a member came by, if it would let it in again; empty: it would
    not.
    """
    by = {member.token for member in known.members if member.host == host}
    good = (t for t in known.tokens if t.id in by and t.good(now_s) and not t.spent)
    return next((token.name for token in good), "")


async def _key(state: State, begins: str) -> tuple[str, str]:
    """The one key that begins so, and who shows it, at whichever doors: any host may show another's
    at its own. A whole one need not be let in now.
    """
    found: dict[str, list[str]] = {}
    for row in await doors.rows(state):
        if row.public.startswith(begins):
            found.setdefault(row.public, []).append(f"{row.name} on {row.host}")
    if not found and len(begins) == WHOLE:
        return begins, ""
    if len(found) != 1:
        several = ", ".join(f"{key[:16]} of {' and '.join(who)}" for key, who in found.items())
        raise NotFound(
            f"{len(found) or 'no'} keys that are let in begin with {begins}",
            fix=f"Give more digits: {several}" if found else "`meshrl keys` shows them",
        )
    [(public, shown)] = found.items()
    return public, f" of {' and '.join(shown)}"


def _named(place: MeshPlace, name: str) -> list[str]:
    """The hosts whose name this is, or begins so."""
    known = [MeshSettings.from_file(place.settings).host, *joined_hosts(place)]
    return [name] if name in known else [host for host in known if host.startswith(name)]


def _joined(place: MeshPlace, name: str) -> str:
    known, named = joined_hosts(place), _named(place, name)
    if named == [head := MeshSettings.from_file(place.settings).host]:
        raise Refused(f"{head} is the head of the mesh", fix="`meshrl down` stops the mesh")
    if len(named) != 1:
        if named:
            raise NotFound(
                f"{len(named)} hosts' names begin with {name}", fix=f"Say more: {', '.join(named)}"
            )
        raise NotFound(
            f"no host called {name} has joined, and no key begins with 8 hexadecimal digits of it",
            fix=f"Hosts: {', '.join(known) or 'none'}; `meshrl keys` shows keys",
        )
    return named[0]
