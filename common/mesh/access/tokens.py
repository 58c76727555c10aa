"""The tokens that a mesh gives, and by what the gateway knows who comes: tokens and members.

The gateway's doorkeeper reads the file, on a thread of its own, whenever it has changed: a token
that is revoked lets nobody in from then on.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from meshrl.common.base.errors import Damaged, NotFound, Refused
from meshrl.common.base.files.lines import signature
from meshrl.common.mesh.access.records import (
    PERSON,
    KnownHolders,
    Member,
    Token,
    changing,
    digest,
    read,
)
from meshrl.common.mesh.access.ticket import Ticket
from meshrl.common.mesh.transport.keys import KeyPair


class TokenTable:
    """Those on record in a file; `wall` is the clock that they expire by, in seconds."""

    def __init__(self, path: Path, wall: Callable[[], float]) -> None:
        self._path, self._wall = path, wall
        self._seen: object = None
        self._by_key: dict[str, str] = {}  # -> id
        self._tokens: dict[str, Token] = {}  # by id, as the next
        self._members: dict[str, Member] = {}

    def holder(self, public: bytes) -> str | None:
        """The id of the member, or of the good token, that has this public key; None: there is
        none.
        """
        self._look()
        found = self._by_key.get(digest(public), "")
        return found if self.good(found) else None

    def good(self, id: str) -> bool:
        """Whether a token still lets somebody in, or a member is one: connections outlive what let
        them in.
        """
        token = self.token(id)
        return id in self._members or (token is not None and token.good(self._wall()))

    def token(self, id: str) -> Token | None:
        """The token of an id; None: there is none."""
        self._look()
        return self._tokens.get(id)

    def member(self, id: str) -> Member | None:
        """The member of an id; None: there is none."""
        self._look()
        return self._members.get(id)

    def priority(self, id: str) -> int:
        """The highest `pool.priority` that a token's jobs may have."""
        token = self.token(id)
        return token.priority if token is not None else 0

    def _look(self) -> None:
        """Nobody is let in while the file is damaged or gone."""
        try:
            now = signature(self._path)
            if now == self._seen:
                return
            known = read(self._path) if now is not None else KnownHolders()
        except Damaged:
            now, known = None, KnownHolders()
        # Two threads look: each replaces whole tables.
        self._tokens = {token.id: token for token in known.tokens}
        self._members = {member.id: member for member in known.members}
        of_members = {member.key: member.id for member in known.members}
        self._by_key = of_members | {token.key: token.id for token in known.tokens}
        self._seen = now


def made(
    name: str,
    lasts_s: float,
    now_s: float,
    address: str,
    gateway: str,
    priority: int = 0,
    kind: str = PERSON,
    uses: int = 1,
) -> tuple[Token, Ticket]:
    """A new token, and the ticket to hand over, which is kept nowhere."""
    pair = KeyPair.new()
    expires_s = now_s + lasts_s
    id, key = uuid.uuid4().hex[:12], digest(pair.public)
    token = Token(id, name, key, now_s, expires_s, priority=priority, kind=kind, uses=uses)
    return token, Ticket(address, gateway, pair.secret.decode())


def keep(path: Path, token: Token) -> None:
    """Puts a new one on record. Refused when another good one has its name."""
    with changing(path) as known:
        others = [t for t in known.tokens if t.good(token.made_s) and not t.spent]
        if any(other.name == token.name for other in others):
            raise Refused(
                f"{token.name} has a token already",
                fix=f"`meshrl token revoke {token.name}` first, or take another name",
            )
        known.tokens.append(token)


def keep_all(path: Path, tokens: Iterable[Token]) -> None:
    """Puts those on record that are not yet: one that was revoked meanwhile stays so."""
    with changing(path) as known:
        ids = {token.id for token in known.tokens}
        known.tokens.extend(token for token in tokens if token.id not in ids)


def revoke(path: Path, which: str, now_s: float) -> list[Token]:
    """Revokes the good tokens of a name or an id; these. Hosts that came by one stay. NotFound."""
    with changing(path) as known:
        found = [t for t in known.tokens if which in (t.id, t.name) and t.good(now_s)]
        if not found:
            raise NotFound(f"there is no good token {which}", fix="`meshrl token list` shows them")
        known.tokens[:] = [replace(t, revoked_s=now_s) if t in found else t for t in known.tokens]
    return found
