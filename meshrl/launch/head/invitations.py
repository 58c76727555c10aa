"""Tokens that let hosts in, made where the mesh's own are kept."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from meshrl.common.mesh.access import identity, tokens
from meshrl.common.mesh.access.records import FILE, HOST
from meshrl.common.mesh.access.ticket import Ticket
from meshrl.directory.places import MeshPlace


def for_host(place: MeshPlace, name: str | None, lasts_s: float, uses: int = 1) -> Ticket:
    """A token that lets in so many hosts; 0: any number."""
    door = identity.existing(place.directory)
    named = name or f"host-{secrets.token_hex(3)}"
    now_s, at = time.time(), (door.address, door.public)
    token, ticket = tokens.made(named, lasts_s, now_s, *at, kind=HOST, uses=uses)
    tokens.keep(place.directory / FILE, token)
    return ticket


def write(ticket: Ticket, out: Path) -> None:
    """Puts it into a new file, for this user's eyes alone."""
    with os.fdopen(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(ticket.text + "\n")
