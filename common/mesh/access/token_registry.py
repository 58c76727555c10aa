"""Registry of access tokens and members, by which the gateway recognises its callers.

The gateway's ZAP authenticator reloads the file, on its own thread, whenever it has changed. A
revoked token admits no connection from then on.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from meshrl.common.base.errors import CorruptData, NotFound, Refused
from meshrl.common.base.files.json_lines import read_signature
from meshrl.common.mesh.access.access_records import (
    PERSON_TOKEN,
    AccessRecords,
    MemberRecord,
    TokenRecord,
    digest_key,
    edit_records,
    read_records,
)
from meshrl.common.mesh.access.access_token import AccessToken
from meshrl.common.mesh.transport.keys import KeyPair


class TokenRegistry:
    """Tokens and members of a records file; `wall` is the clock in seconds that tokens expire
    by.
    """

    def __init__(self, path: Path, wall: Callable[[], float]) -> None:
        self._path, self._wall = path, wall
        self._signature: object = None
        self._by_key: dict[str, str] = {}  # -> id
        self._tokens: dict[str, TokenRecord] = {}  # by id, as the next
        self._members: dict[str, MemberRecord] = {}

    def find_holder(self, public: bytes) -> str | None:
        """Return the id of the member or valid token with this public key; None if there is
        none.
        """
        self._reload()
        found = self._by_key.get(digest_key(public), "")
        return found if self.is_valid(found) else None

    def is_valid(self, id: str) -> bool:
        """Return True if the id is a member or a valid token: connections outlive their tokens."""
        token = self.find_token(id)
        return id in self._members or (token is not None and token.is_valid(self._wall()))

    def find_token(self, id: str) -> TokenRecord | None:
        """Return the token with this id; None if there is none."""
        self._reload()
        return self._tokens.get(id)

    def find_member(self, id: str) -> MemberRecord | None:
        """Return the member with this id; None if there is none."""
        self._reload()
        return self._members.get(id)

    def find_priority(self, id: str) -> int:
        """Return the highest `pool.priority` that a token's jobs may have."""
        token = self.find_token(id)
        return token.priority if token is not None else 0

    def _reload(self) -> None:
        """Reload a changed file. While it is corrupt or missing, no caller is admitted."""
        try:
            now = read_signature(self._path)
            if now == self._signature:
                return
            known = read_records(self._path) if now is not None else AccessRecords()
        except CorruptData:
            now, known = None, AccessRecords()
        # Two threads reload: each replaces whole tables.
        self._tokens = {token.id: token for token in known.tokens}
        self._members = {member.id: member for member in known.members}
        of_members = {member.key: member.id for member in known.members}
        self._by_key = of_members | {token.key: token.id for token in known.tokens}
        self._signature = now


def create_token(
    name: str,
    lifetime_s: float,
    now_s: float,
    address: str,
    gateway: str,
    priority: int = 0,
    kind: str = PERSON_TOKEN,
    uses: int = 1,
) -> tuple[TokenRecord, AccessToken]:
    """Create a token: its record, and the access token for its user, which is not stored."""
    pair = KeyPair.generate()
    expires_s = now_s + lifetime_s
    id, key = uuid.uuid4().hex[:12], digest_key(pair.public)
    token = TokenRecord(id, name, key, now_s, expires_s, priority=priority, kind=kind, uses=uses)
    return token, AccessToken(address, gateway, pair.secret.decode())


def add_token(path: Path, token: TokenRecord) -> None:
    """Add a record. Raises Refused if another valid token has its name."""
    with edit_records(path) as known:
        others = [t for t in known.tokens if t.is_valid(token.made_s) and not t.is_exhausted]
        if any(other.name == token.name for other in others):
            raise Refused(
                f"{token.name} already has a token",
                fix=f"Run `meshrl token revoke {token.name}` first, or choose another name",
            )
        known.tokens.append(token)


def add_missing_tokens(path: Path, tokens: Iterable[TokenRecord]) -> None:
    """Add the records that are missing; a token revoked since then stays revoked."""
    with edit_records(path) as known:
        ids = {token.id for token in known.tokens}
        known.tokens.extend(token for token in tokens if token.id not in ids)


def revoke_tokens(path: Path, name_or_id: str, now_s: float) -> list[TokenRecord]:
    """Revoke the valid tokens with a name or an id and return them.

    Hosts that joined by one of them stay members. Raises NotFound.
    """
    with edit_records(path) as known:
        found = [t for t in known.tokens if name_or_id in (t.id, t.name) and t.is_valid(now_s)]
        if not found:
            raise NotFound(
                f"there is no valid token {name_or_id}",
                fix="Run `meshrl token list` to list the tokens",
            )
        known.tokens[:] = [replace(t, revoked_s=now_s) if t in found else t for t in known.tokens]
    return found
