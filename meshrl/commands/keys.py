"""`meshrl keys`: keys that a mesh admits, and their revocation."""

from __future__ import annotations

import json
import re
import time
import uuid
from functools import partial
from pathlib import Path

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import NotFound, Refused
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.access import access_records
from meshrl.common.state.hosts import credentials, host_requests
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.directory_paths import MeshPaths, find_head
from meshrl.directory.joined_hosts import read_joined_hosts
from meshrl.directory.mesh_query import ANSWER_TIMEOUT_S, query_mesh
from meshrl.view.json_output import to_json_document
from meshrl.view.live import console_tables

EXPEL_TIMEOUT_S = 20.0
KEY_DIGITS = 64  # hexadecimal digits of a key
KEY_PREFIX_PATTERN = f"[0-9a-f]{{8,{KEY_DIGITS}}}"  # or how one begins


def print_keys(mesh: Path | None, as_json: bool) -> None:
    """Print the admitted keys."""
    place = find_head(mesh)
    found = query_mesh(place, credentials.list_credentials, ANSWER_TIMEOUT_S)
    if as_json:
        print(json.dumps(to_json_document(found)))
        return
    table = console_tables.make_table("host", "role", "process", "key", wraps=False)
    for row in found:
        table.add_row(row.host, row.role, row.process, row.public_key)
    console_tables.print_table(table)


def revoke_host_or_key(host_or_key: str, mesh: Path | None) -> None:
    """Revoke a host, or one key."""
    place = find_head(mesh)
    key_match = re.fullmatch(
        KEY_PREFIX_PATTERN, host_or_key.lower().removesuffix("...").removesuffix("…")
    )
    if key_match and not _match_hosts(place, host_or_key):
        public, owner_text = query_mesh(
            place, partial(_find_key, prefix=key_match[0]), ANSWER_TIMEOUT_S
        )
        if not query_mesh(
            place, lambda state: credentials.revoke_key(state, public), ANSWER_TIMEOUT_S
        ):
            raise Refused("this key is already revoked")
        print(
            f"the key {public[:8]}{owner_text} is revoked; its process is admitted with a new key "
            "after a restart"
        )
        return
    host = _find_joined_host(place, host_or_key)

    async def expelled(state: StateClient) -> None:
        op, about, timeout_s = uuid.uuid4().hex, {"host": host}, EXPEL_TIMEOUT_S - ANSWER_TIMEOUT_S
        await host_requests.submit_host_request(
            state, SystemClock(), op, host_requests.LEAVE, about, timeout_s
        )

    token = _find_valid_token(
        access_records.read_records(place.directory / access_records.RECORDS_FILE),
        host,
        time.time(),
    )
    query_mesh(place, expelled, EXPEL_TIMEOUT_S)
    print(f"{host} is revoked, and its processes are cut off; it may join again with a new token")
    if token:
        print(
            f"its token {token} still admits hosts, including this one: "
            f"`meshrl token revoke {token}` revokes it"
        )


def _find_valid_token(known: access_records.AccessRecords, host: str, now_s: float) -> str:
    """Return the name of the member's token if it would still admit the host; empty if not."""
    by = {member.token for member in known.members if member.host == host}
    good = (t for t in known.tokens if t.id in by and t.is_valid(now_s) and not t.is_exhausted)
    return next((token.name for token in good), "")


async def _find_key(state: StateClient, prefix: str) -> tuple[str, str]:
    """Return the one key with this prefix, and the services that present it.

    Any host may present another's key at its own endpoints. A complete key need not be admitted
    now.
    """
    found: dict[str, list[str]] = {}
    for row in await credentials.list_credentials(state):
        if row.public_key.startswith(prefix):
            found.setdefault(row.public_key, []).append(f"{row.process} on {row.host}")
    if not found and len(prefix) == KEY_DIGITS:
        return prefix, ""
    if len(found) != 1:
        several = ", ".join(f"{key[:16]} of {' and '.join(who)}" for key, who in found.items())
        raise NotFound(
            f"{len(found) or 'no'} admitted keys begin with {prefix}",
            fix=f"Give more digits: {several}" if found else "Run `meshrl keys` to list them",
        )
    [(public, services)] = found.items()
    return public, f" of {' and '.join(services)}"


def _match_hosts(place: MeshPaths, name: str) -> list[str]:
    """Return the hosts with this name or prefix."""
    known = [MeshSettings.from_file(place.settings).host, *read_joined_hosts(place)]
    return [name] if name in known else [host for host in known if host.startswith(name)]


def _find_joined_host(place: MeshPaths, name: str) -> str:
    known, named = read_joined_hosts(place), _match_hosts(place, name)
    if named == [head := MeshSettings.from_file(place.settings).host]:
        raise Refused(f"{head} is the head of the mesh", fix="Run `meshrl down` to stop the mesh")
    if len(named) != 1:
        if named:
            raise NotFound(
                f"{len(named)} host names begin with {name}",
                fix=f"Choose one of: {', '.join(named)}",
            )
        raise NotFound(
            f"no joined host matches {name}, and it is not a key prefix of 8 hexadecimal digits",
            fix=f"Choose one of: {', '.join(known) or 'none'}; `meshrl keys` lists keys",
        )
    return named[0]
