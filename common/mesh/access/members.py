"""Hosts that join with a token and then are members, each by its own key, independent of the
token.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

from meshrl.common.base.errors import Refused
from meshrl.common.mesh.access.access_records import (
    HOST_TOKEN,
    AccessRecords,
    MemberRecord,
    TokenRecord,
    digest_key,
    edit_records,
)

REJOIN_WINDOW_S = (
    600.0  # for repeated requests of an admitted host, because the answer may have been lost
)
NEW_TOKEN_HINT = "Create a new token: run `meshrl token create --host` at the head of the mesh"


def admit_member(path: Path, token_id: str, host: str, public: bytes, now_s: float) -> None:
    """Admit the host with this key as a member; a repetition within REJOIN_WINDOW_S succeeds.

    Raises Refused if the token does not admit it, or another host has its name or its key.
    """
    key = digest_key(public)
    with edit_records(path) as known:
        same = next((m for m in known.members if m.host == host or m.key == key), None)
        if same is not None:
            _reject_different_member(
                same, MemberRecord(same.id, host, key, token_id, same.since_s), now_s
            )
            return
        token = next((t for t in known.tokens if t.id == token_id), None)
        if token is None or (why := _explain_unusable(token, now_s)):
            raise Refused(
                why if token is not None else "the mesh has no such token", fix=NEW_TOKEN_HINT
            )
        if any(t.key == key for t in known.tokens):
            raise Refused("this key belongs to a token, not to a host")
        known.members.append(MemberRecord(uuid.uuid4().hex[:12], host, key, token_id, now_s))
        known.tokens[known.tokens.index(token)] = replace(token, used=token.used + 1, host=host)


def _reject_different_member(known: MemberRecord, requested: MemberRecord, now_s: float) -> None:
    if known != requested:
        raise Refused(
            f"a host named {known.host} is already in the mesh", fix="Join from a new directory"
        )
    if now_s - known.since_s > REJOIN_WINDOW_S:
        raise Refused(
            f"{known.host} joined {now_s - known.since_s:.0f} s ago, so it no longer receives its "
            "secret",
            fix=f"Join again as a new host; run `meshrl keys revoke {known.host}` at the head to "
            "remove this one",
        )


def _explain_unusable(token: TokenRecord, now_s: float) -> str:
    """Explain why no host can join with this token; empty if one can."""
    if token.kind != HOST_TOKEN:
        return f"the token of {token.name} is for submitting jobs, not for joining"
    if token.revoked_s:
        return "this token was revoked"
    if now_s >= token.expires_s:
        return "this token has expired"
    if not token.is_exhausted:
        return ""
    if token.uses == 1:
        return f"this token has admitted {token.host}, and permits one host"
    return f"this token has admitted all {token.uses} hosts that it permits, {token.host} last"


def undo_admission(path: Path, token_id: str, host: str) -> None:
    """Undo an admission that failed later, and restore the token."""
    with edit_records(path) as known:
        if _remove_host(known, host, token_id):
            known.tokens[:] = [
                replace(t, used=t.used - 1, host="") if t.id == token_id else t
                for t in known.tokens
            ]


def remove_member(path: Path, host: str) -> None:
    """Remove a host from the members: its calls are rejected from then on."""
    if path.exists():
        with edit_records(path) as known:
            _remove_host(known, host)


def _remove_host(known: AccessRecords, host: str, token_id: str = "") -> bool:
    """Remove a host, with `token_id` only if that token admitted it; return True if it was a
    member.
    """
    removed = [m for m in known.members if m.host == host and token_id in ("", m.token)]
    known.members[:] = [member for member in known.members if member not in removed]
    return bool(removed)
