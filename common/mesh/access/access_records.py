"""Records of the callers that a mesh's gateway admits: tokens, and members, which are joined hosts.

Each has a key, of which the file stores only the digest.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.base.files import documents
from meshrl.common.base.files.file_locks import try_lock

RECORDS_FILE = "tokens.json"  # in the mesh's directory
REPAIR_HINT = (
    "Restore a copy of it, or remove it. Without it all tokens are invalid, joined hosts stay "
    "without a notice, and `meshrl token create` creates new tokens"
)
LOCK_TIMEOUT_S = (
    5.0  # wait for the lock: less than callers wait for the thread that changes the file
)
POLL_S = 0.05  # seconds between two attempts to lock it
# Kinds of tokens: a person's submits jobs, a host's joins the mesh.
PERSON_TOKEN, HOST_TOKEN = "person", "host"


@dataclass(frozen=True)
class TokenRecord:
    """Record of a token. Times are wall-clock seconds."""

    id: str
    name: str  # person or host that received it
    key: str  # digest of its public key
    made_s: float
    expires_s: float
    revoked_s: float = 0.0  # 0: not revoked
    priority: int = 0  # the highest `pool.priority` that its jobs may have
    kind: str = PERSON_TOKEN
    uses: int = 1  # hosts that a host's token may admit; 0: any number
    used: int = 0  # hosts that it has admitted
    host: str = ""  # last admitted host

    def is_valid(self, now_s: float) -> bool:
        """Return True if the token is neither revoked nor expired."""
        return not self.revoked_s and now_s < self.expires_s

    @property
    def is_exhausted(self) -> bool:
        """True if the token has admitted as many hosts as it may."""
        return bool(self.uses) and self.used >= self.uses


@dataclass(frozen=True)
class MemberRecord:
    """Record of a host that has joined and authenticates with its own key."""

    id: str
    host: str
    key: str  # digest of its public key
    token: str  # id of the token that admitted it
    since_s: float  # wall clock


@dataclass
class AccessRecords:
    """All records in the order of their creation, including invalid tokens."""

    tokens: list[TokenRecord] = field(default_factory=list)
    members: list[MemberRecord] = field(default_factory=list)


def read_records(path: Path) -> AccessRecords:
    """Read the records; a missing file has none. Raises CorruptData."""
    if not path.exists():
        return AccessRecords()
    try:
        document = documents.read(path, REPAIR_HINT)
        tokens = [TokenRecord(**row) for row in document["tokens"]]
        return AccessRecords(tokens, [MemberRecord(**row) for row in document["members"]])
    except (KeyError, TypeError) as error:
        raise documents.make_corrupt_error(
            path, f"it contains no valid token records: {error!r}", REPAIR_HINT
        ) from error


@contextmanager
def edit_records(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[AccessRecords]:
    """Lock the records, yield them for changes in place, and write them if the block succeeds.

    Raises DeadlineExceeded, without changes, if another process holds the lock for longer than
    `timeout_s` seconds.
    """
    with path.with_suffix(".lock").open("w") as lock:
        until_s = time.monotonic() + timeout_s
        while not try_lock(lock.fileno()):
            if time.monotonic() >= until_s:
                raise DeadlineExceeded(
                    f"another process has locked the token file for {timeout_s:g} s",
                    where=lock.name,
                    fix="Try again; run `fuser` with the file's path to find the process",
                )
            time.sleep(POLL_S)
        known = read_records(path)
        yield known
        documents.write(path, asdict(known))


def digest_key(public: bytes) -> str:
    """Return the digest under which a public key is stored."""
    return hashlib.blake2b(public, digest_size=32).hexdigest()
