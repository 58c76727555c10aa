"""Files for a Redis that another program starts for a mesh, as in a container of its own.

They are its certificate, its users, and the URL by which the mesh's head reaches it.
"""

from __future__ import annotations

import datetime
import hashlib
import secrets
from pathlib import Path

from meshrl.common.base.files import documents
from meshrl.launch.redis.access import certificates

USERS_FILE, URL_FILE = "users.acl", "url"
REDIS_USER = "mesh"
PASSWORD_BYTES = 32


def write_redis_files(directory: Path, host: str, port: int, now: datetime.datetime) -> None:
    """Write the files into the directory, for this user alone.

    `authority.pem`, `redis.pem` and `redis-key.pem` are for `--tls-ca-cert-file`, `--tls-cert-file`
    and `--tls-key-file`, `users.acl` for `--aclfile`, and `url` for $MESHRL_REDIS_URL.
    """
    certificates.issue_certificate(directory, [host], now)
    # The one certificate lasts as long as its authority: no process may be able to issue another.
    (directory / certificates.CA_KEY_FILE).unlink()
    password = secrets.token_hex(PASSWORD_BYTES)
    digest = hashlib.sha256(password.encode()).hexdigest()
    # No client is `default`, which is off. But as `default` the server loads its file, and drops
    # commands that `default` may not run, without an error: so `default` may run all.
    users = [
        "user default off resetpass ~* &* +@all",
        f"user {REDIS_USER} on #{digest} ~* &* +@all",
    ]
    documents.write_bytes(directory / USERS_FILE, "".join(f"{line}\n" for line in users).encode())
    url = f"rediss://{REDIS_USER}:{password}@{host}:{port}/0"
    documents.write_bytes(directory / URL_FILE, f"{url}\n".encode())
