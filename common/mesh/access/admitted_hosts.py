"""Admitted hosts of a mesh: their records for Redis, which grant no access by themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from meshrl.common.base.files import documents
from meshrl.common.base.host.settings import derive_redis_password

HOSTS_FILE = "hosts.json"  # in the mesh's directory, of its head
REPAIR_HINT = (
    "Restore a copy of it. Without a copy: run `meshrl down`, remove it and {other}, and restart "
    "the mesh; on each host run `meshrl leave` and join with a new token"
)


@dataclass(frozen=True)
class AdmittedHost:
    """Host that may belong to the mesh, with digests of the passwords of its roles."""

    host: str
    passwords: dict[str, str]  # role -> SHA-256, in hexadecimal digits
    made_s: float  # wall clock

    @classmethod
    def from_secret(
        cls, host: str, secret: str, roles: Iterable[str], now_s: float
    ) -> AdmittedHost:
        """Create a host whose processes have `secret`, for these roles."""
        digests = {
            role: hashlib.sha256(derive_redis_password(secret, role).encode()).hexdigest()
            for role in roles
        }
        return cls(host, digests, now_s)


def read_hosts(directory: Path) -> dict[str, AdmittedHost]:
    """Read the hosts that have joined the mesh with this directory, by name. Raises CorruptData."""
    path = directory / HOSTS_FILE
    try:
        rows = documents.read(path, REPAIR_HINT.format(other="joined.json"))["hosts"]
        return {row["host"]: AdmittedHost(**row) for row in rows}
    except FileNotFoundError:
        return {}
    except (KeyError, TypeError) as error:
        fix = REPAIR_HINT.format(other="joined.json")
        raise documents.make_corrupt_error(
            path, f"it contains no valid host records: {error!r}", fix
        ) from error


def write_hosts(directory: Path, hosts: Iterable[AdmittedHost]) -> None:
    """Write the hosts to a file that only this user can read. Raises StorageFull."""
    documents.write(directory / HOSTS_FILE, {"hosts": [asdict(one) for one in hosts]})
