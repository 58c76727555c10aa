"""What a Redis needs that somebody else starts for a mesh, as in a container of its own: its
certificate, its users, and the URL by which the mesh's head reaches it.
"""

from __future__ import annotations

import datetime
import hashlib
import secrets
from pathlib import Path

from meshrl.common.base.files import documents
from meshrl.launch.redis.access import certificate

USERS, URL = "users.acl", "url"
USER = "mesh"
PASSWORD_BYTES = 32


def make(directory: Path, host: str, port: int, now: datetime.datetime) -> None:
    """Puts the files into the directory, for this user alone: `authority.pem`, `redis.pem` and
    `redis-key.pem` for `--tls-ca-cert-file`, `--tls-cert-file` and `--tls-key-file`, `users.acl`
    for `--aclfile`, and `url` for $MESHRL_REDIS_URL.
    """
    certificate.issue(directory, [host], now)
    # The one certificate lasts as long as its authority: nobody is to be able to make another.
    (directory / certificate.AUTHORITY_KEY).unlink()
    password = secrets.token_hex(PASSWORD_BYTES)
    digest = hashlib.sha256(password.encode()).hexdigest()
    # Nobody is `default`, which is off. But as `default` the server loads its own file, and leaves
    # out, without an error, what that may not do: so it may do all.
    users = ["user default off resetpass ~* &* +@all", f"user {USER} on #{digest} ~* &* +@all"]
    documents.put(directory / USERS, "".join(f"{line}\n" for line in users).encode())
    url = f"rediss://{USER}:{password}@{host}:{port}/0"
    documents.put(directory / URL, f"{url}\n".encode())
