"""Which services a host takes: what a command line says of it, and whose services may be there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.isolation.tiers import has_sufficient_tier
from meshrl.common.state.pool.demand.requirements import JobRequirements
from meshrl.common.state.pool.scheduling.snapshot import HOST_LEFT, PoolHost
from meshrl.common.state.pool.workers.process_names import SERVICE_NAMES

NONE = "none"
ALL_SERVICES = tuple(SERVICE_NAMES.values())
MAX_NAMED_HOSTS = 6  # hosts that a reason names


def parse_services(text: str) -> tuple[str, ...]:
    """What a host takes, of `shards,sandboxes`, one of the two, or `none`; ConfigError."""
    if text == NONE:
        return ()
    words = text.split(",")
    for word in words:
        if word not in ALL_SERVICES:
            raise ConfigError(
                f"{word!r:.60} is no service that a host takes",
                where="--services",
                fix=f"Choose from {', '.join(ALL_SERVICES)}; or {NONE}",
            )
    return tuple(word for word in ALL_SERVICES if word in words)


def format_services(services: Sequence[str]) -> str:
    """What `taken` reads."""
    return ",".join(services) or NONE


def explain_rejected_service(host: PoolHost, kind: str, requirements: JobRequirements) -> str:
    """Why a host does not take a service of this kind, in words that follow its name; empty where
    it does, whether or not it is there.
    """
    if SERVICE_NAMES[kind] not in host.takes:
        return f"takes {' and '.join(host.takes) or 'no services'}"
    if (
        kind != "sandbox"
        or not requirements.tier
        or host.tiers is None
        or has_sufficient_tier(host.tiers, requirements.tier)
    ):
        return ""
    if host.is_probing_isolation:
        return "still finds out which isolation it has"
    return f"has {' and '.join(host.tiers) or 'no isolation'}"


def explain_unplaced_service(
    hosts: Iterable[PoolHost], kind: str, requirements: JobRequirements
) -> str:
    """Why a service of this kind has no host now: what each of them says; empty when there is
    none to ask, as before any has come.
    """
    said = []
    for host in hosts:
        if host.draining == HOST_LEFT:
            continue
        why = explain_rejected_service(host, kind, requirements)
        away = "drains" if host.alive and host.draining else "is away"
        said.append(f"{host.name} {why or f'takes them and {away}'}")
    if not said:
        return ""
    inside = (
        f" with sandbox.tier = {requirements.tier}"
        if kind == "sandbox" and requirements.tier
        else ""
    )
    more = f"; and {len(said) - MAX_NAMED_HOSTS} more" if len(said) > MAX_NAMED_HOSTS else ""
    return (
        f"no host takes its {SERVICE_NAMES[kind]}{inside} now: "
        f"{'; '.join(said[:MAX_NAMED_HOSTS])}{more}"
    )
