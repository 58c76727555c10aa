"""`meshrl token`: tokens that let other users submit jobs; `meshrl secrets`: a new mesh's secrets.

The secrets let the parts of a mesh authenticate each other. They are made before any part runs, for
an orchestrator to hand out.
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
from meshrl.common.mesh.access import access_records, gateway_identity, token_registry
from meshrl.common.mesh.access.access_records import (
    HOST_TOKEN,
    PERSON_TOKEN,
    RECORDS_FILE,
    TokenRecord,
)
from meshrl.common.mesh.access.access_token import GATEWAY_PORT, AccessToken, parse_gateway_address
from meshrl.common.mesh.transport.keys import KeyPair
from meshrl.directory.directory_paths import MeshPaths, find_head
from meshrl.launch.head import head_secrets
from meshrl.launch.head.head_secrets import HeadSecrets
from meshrl.launch.head.host_tokens import create_host_token, write_token
from meshrl.launch.redis.access import external_redis
from meshrl.view.live import console_tables

DAY_S, HOUR_S = 86_400.0, 3600.0
VALID = "valid"


def create_token(
    name: str, days: float, priority: int, out: Path | None, mesh: Path | None
) -> None:
    """Print the token, or write it to `out`, which must not exist."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]*", name):
        raise ConfigError(f"{name!r} is not a token name", fix="Use letters, digits and . _ @ -")
    place = find_head(mesh)
    door = gateway_identity.read_identity(place.directory)
    _check_not_existing(out)
    at, lifetime_s = (door.address, door.public), days * DAY_S
    token, ticket = token_registry.create_token(name, lifetime_s, time.time(), *at, priority)
    token_registry.add_token(_token_file(place), token)
    if _deliver(ticket, out):
        print(f"{out} contains a token for {name}: meshrl submit JOB --token {out}")


def print_new_host_token(
    name: str | None, hours: float, uses: int, out: Path | None, mesh: Path | None
) -> None:
    """Create a token that admits `uses` hosts (0: any number), and print it or write it to `out`.

    Raises Refused for a mesh of one host.
    """
    place = find_head(mesh)
    if not MeshSettings.from_file(place.settings).joinable:
        raise Refused(
            "this mesh has one host", fix="Start one for several with `meshrl up --listen HOST`"
        )
    _check_not_existing(out)
    if _deliver(create_host_token(place, name, hours * HOUR_S, uses), out):
        allowed_hosts = {0: "any number of hosts", 1: "one host"}.get(uses, f"{uses} hosts")
        print(f"{out} admits {allowed_hosts}: copy it there; meshrl join {out.name if out else ''}")


def _check_not_existing(out: Path | None) -> None:
    if out is not None and out.exists():
        raise Refused(f"{out} already exists", fix="Name another file")


def _deliver(token: AccessToken, out: Path | None) -> bool:
    """Print the token, or write it to `out`; return True if it was written."""
    if out is None:
        print(token.encoded)
        return False
    write_token(token, out)
    return True


def print_tokens(mesh: Path | None, as_json: bool) -> None:
    """Print the records of the tokens."""
    known, now_s = access_records.read_records(_token_file(find_head(mesh))).tokens, time.time()
    if as_json:
        about = [
            asdict(token) | {"good": _describe_validity(token, now_s) == VALID} for token in known
        ]
        print(json.dumps([{k: v for k, v in record.items() if k != "key"} for record in about]))
        return
    table = console_tables.make_table(
        "token", "for", "created", "expires", "priority", "hosts", "", wraps=False
    )
    for token in known:
        dates = _format_date(token.made_s), _format_date(token.expires_s)
        of_host = token.kind == HOST_TOKEN
        hosts = f"{token.used} of {token.uses or 'any'}" if of_host else ""  # admitted hosts
        priority = "" if of_host else str(token.priority)
        table.add_row(
            token.id, token.name, *dates, priority, hosts, _describe_validity(token, now_s)
        )
    console_tables.print_table(table)


def revoke_tokens(name_or_id: str, mesh: Path | None) -> None:
    """Revoke tokens and print how many."""
    revoked = token_registry.revoke_tokens(_token_file(find_head(mesh)), name_or_id, time.time())
    of_hosts = any(token.kind == HOST_TOKEN for token in revoked)
    effect = "hosts that it admitted stay" if of_hosts else "jobs that it submitted continue"
    print(f"revoked {len(revoked)} of {name_or_id}; {effect}")


def _token_file(place: MeshPaths) -> Path:
    return place.directory / RECORDS_FILE


def _format_date(timestamp_s: float) -> str:
    return datetime.fromtimestamp(timestamp_s).strftime("%Y-%m-%d %H:%M")


def _describe_validity(token: TokenRecord, now_s: float) -> str:
    if token.revoked_s:
        return f"revoked {_format_date(token.revoked_s)}"
    if token.is_exhausted:
        return f"used by {token.host}" if token.uses == 1 else "used"
    return VALID if token.is_valid(now_s) else "expired"


REDIS_PORT = 6379
JOIN_FILE, SUBMIT_FILE, REDIS_DIR = "join.token", "submit.token", "redis"


def make_secrets(
    directory: Path, head_address: str, exposed_address: str, redis_address: str, days: float
) -> None:
    """Create the directory of secrets atomically, and print its content.

    Raises Refused if it exists; ConfigError for an invalid NAME[:PORT].
    """
    head_endpoint = parse_gateway_address(head_address, GATEWAY_PORT, "--head")
    exposed_endpoint = parse_gateway_address(exposed_address, GATEWAY_PORT, "--exposed")
    at = (
        urlsplit(parse_gateway_address(redis_address, REDIS_PORT, "--redis"))
        if redis_address
        else None
    )
    if os.path.lexists(directory):
        raise Refused(
            f"{directory} already exists, and its secrets may be in use",
            fix="Name another directory: new secrets belong to another mesh",
        )
    fresh = directory.with_name(f".{directory.name}.{os.getpid()}")
    fresh.mkdir(parents=True, mode=0o700)
    try:
        pair, now_s, lifetime_s = KeyPair.generate(), time.time(), days * DAY_S
        gateway = pair.public.decode()
        host, joining = token_registry.create_token(
            JOIN_FILE, lifetime_s, now_s, head_endpoint, gateway, kind=HOST_TOKEN, uses=0
        )
        user_token, submitting = token_registry.create_token(
            SUBMIT_FILE, lifetime_s, now_s, exposed_endpoint, gateway, kind=PERSON_TOKEN
        )
        stored_secrets = HeadSecrets(gateway, pair.secret.decode(), [host, user_token])
        stored_secrets.write(fresh / head_secrets.HEAD_FILE)
        write_token(joining, fresh / JOIN_FILE)
        write_token(submitting, fresh / SUBMIT_FILE)
        if at is not None:
            (fresh / REDIS_DIR).mkdir(mode=0o700)
            now = datetime.now(UTC)
            netloc = at.netloc.rpartition(":")
            external_redis.write_redis_files(fresh / REDIS_DIR, netloc[0], int(netloc[2]), now)
        fresh.rename(directory)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    print(f"{directory} contains the secrets of a mesh, readable only by you:")
    print(
        f"  {head_secrets.HEAD_FILE}    for its head: meshrl up --secrets {head_secrets.HEAD_FILE}"
    )
    print(f"  {JOIN_FILE}   for hosts, any number, for {days:g} days: meshrl join {JOIN_FILE}")
    print(f"  {SUBMIT_FILE} for users who submit jobs: meshrl submit JOB --token {SUBMIT_FILE}")
    if at is not None:
        print(
            f"  {REDIS_DIR}/       for its Redis, and for the head: "
            f"MESHRL_REDIS_URL=./{REDIS_DIR}/url"
        )
