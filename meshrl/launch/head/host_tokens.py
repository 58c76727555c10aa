"""Tokens that admit hosts, made where the mesh's own tokens are stored."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from meshrl.common.mesh.access import gateway_identity, token_registry
from meshrl.common.mesh.access.access_records import HOST_TOKEN, RECORDS_FILE
from meshrl.common.mesh.access.access_token import AccessToken
from meshrl.directory.directory_paths import MeshPaths


def create_host_token(
    mesh_paths: MeshPaths, name: str | None, lifetime_s: float, max_uses: int = 1
) -> AccessToken:
    """Create a token that admits `max_uses` hosts; 0: any number."""
    door = gateway_identity.read_identity(mesh_paths.directory)
    named = name or f"host-{secrets.token_hex(3)}"
    now_s, at = time.time(), (door.address, door.public)
    token, ticket = token_registry.create_token(
        named, lifetime_s, now_s, *at, kind=HOST_TOKEN, uses=max_uses
    )
    token_registry.add_token(mesh_paths.directory / RECORDS_FILE, token)
    return ticket


def write_token(token: AccessToken, path: Path) -> None:
    """Write the token to a new file, readable by this user alone."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token.encoded + "\n")
