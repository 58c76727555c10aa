"""What a mesh has on record of whom its gateway lets in: the tokens that it has given, and the
members, which are hosts that have joined. Each is known by a key, of which the file has the digest
alone.
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
    "Put a copy of it back, or remove it: then no token that was given lets anybody in, hosts that "
    "have joined stay, but are told nothing, and `meshrl token create` makes others"
)
LOCK_TIMEOUT_S = (
    5.0  # of another's lock: less than callers wait for the thread that changes the file
)
POLL_S = 0.05  # between two tries to lock it
# Kinds of tokens: a person's is good for jobs, a host's for joining the mesh.
PERSON_TOKEN, HOST_TOKEN = "person", "host"


@dataclass(frozen=True)
class TokenRecord:
    """One that was given. Times are wall-clock seconds."""

    id: str
    name: str  # whom it was given to
    key: str  # digest of its public key
    made_s: float
    expires_s: float
    revoked_s: float = 0.0  # 0: it is not
    priority: int = 0  # the highest `pool.priority` that its jobs may have
    kind: str = PERSON_TOKEN
    uses: int = 1  # hosts that a host's lets in; 0: any number
    used: int = 0  # hosts that it has let in
    host: str = ""  # the last of these

    def good(self, now_s: float) -> bool:
        """Whether who holds it is heard at all."""
        return not self.revoked_s and now_s < self.expires_s

    @property
    def is_exhausted(self) -> bool:
        """Whether it has let in as many hosts as it may."""
        return bool(self.uses) and self.used >= self.uses


@dataclass(frozen=True)
class MemberRecord:
    """A host that has joined, and is known by a key of its own from then on."""

    id: str
    host: str
    key: str  # digest of its public key
    token: str  # id of that which let it in
    since_s: float  # wall clock


@dataclass
class AccessRecords:
    """All that is on record, also tokens that are good no more, in the order of their making."""

    tokens: list[TokenRecord] = field(default_factory=list)
    members: list[MemberRecord] = field(default_factory=list)


def read_records(path: Path) -> AccessRecords:
    """Nothing where there is no file. Damaged."""
    if not path.exists():
        return AccessRecords()
    try:
        held = documents.read(path, REPAIR_HINT)
        tokens = [TokenRecord(**row) for row in held["tokens"]]
        return AccessRecords(tokens, [MemberRecord(**row) for row in held["members"]])
    except (KeyError, TypeError) as error:
        raise documents.make_corrupt_error(
            path, f"it holds no tokens: {error!r}", REPAIR_HINT
        ) from error


@contextmanager
def edit_records(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[AccessRecords]:
    """What is on record, to be changed in place; written when nothing has failed. DeadlineExceeded
    when another has it locked for longer than `locked_s`: nothing was changed.
    """
    with path.with_suffix(".lock").open("w") as lock:
        until_s = time.monotonic() + timeout_s
        while not try_lock(lock.fileno()):
            if time.monotonic() >= until_s:
                raise DeadlineExceeded(
                    f"another process has the file of tokens locked, for {timeout_s:g} s",
                    where=lock.name,
                    fix="Try again; `fuser` with the name of the file tells which process it is",
                )
            time.sleep(POLL_S)
        known = read_records(path)
        yield known
        documents.write(path, asdict(known))


def digest_key(public: bytes) -> str:
    """By which a public key is on record."""
    return hashlib.blake2b(public, digest_size=32).hexdigest()
