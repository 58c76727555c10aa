"""Which services a host takes: what a command line says of it, and whose services may be there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.isolation.isolation import contains
from meshrl.common.state.pool.demand.needs import Need
from meshrl.common.state.pool.placing.snapshot import LEFT, PoolHost
from meshrl.common.state.pool.workers.names import TAKEN

NONE = "none"
ALL = tuple(TAKEN.values())
NAMED = 6  # hosts that a reason names


def taken(text: str) -> tuple[str, ...]:
    """What a host takes, of `shards,sandboxes`, one of the two, or `none`; ConfigError."""
    if text == NONE:
        return ()
    words = text.split(",")
    for word in words:
        if word not in ALL:
            raise ConfigError(
                f"{word!r:.60} is no service that a host takes",
                where="--services",
                fix=f"Choose from {', '.join(ALL)}; or {NONE}",
            )
    return tuple(word for word in ALL if word in words)


def written(takes: Sequence[str]) -> str:
    """What `taken` reads."""
    return ",".join(takes) or NONE


def refusal(host: PoolHost, kind: str, need: Need) -> str:
    """Why a host does not take a service of this kind, in words that follow its name; empty where
    it does, whether or not it is there.
    """
    if TAKEN[kind] not in host.takes:
        return f"takes {' and '.join(host.takes) or 'no services'}"
    if kind != "sandbox" or not need.tier or host.tiers is None or contains(host.tiers, need.tier):
        return ""
    if host.trying:
        return "still finds out which isolation it has"
    return f"has {' and '.join(host.tiers) or 'no isolation'}"


def nowhere(hosts: Iterable[PoolHost], kind: str, need: Need) -> str:
    """Why a service of this kind has no host now: what each of them says; empty when there is
    none to ask, as before any has come.
    """
    said = []
    for host in hosts:
        if host.draining == LEFT:
            continue
        why = refusal(host, kind, need)
        away = "drains" if host.alive and host.draining else "is away"
        said.append(f"{host.name} {why or f'takes them and {away}'}")
    if not said:
        return ""
    inside = f" with sandbox.tier = {need.tier}" if kind == "sandbox" and need.tier else ""
    more = f"; and {len(said) - NAMED} more" if len(said) > NAMED else ""
    return f"no host takes its {TAKEN[kind]}{inside} now: {'; '.join(said[:NAMED])}{more}"
