"""Services that a host accepts: their text on a command line, and rejections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.isolation.tiers import has_sufficient_tier
from meshrl.common.state.pool.demand.requirements import JobRequirements
from meshrl.common.state.pool.scheduling.snapshot import HOST_LEFT, PoolHost
from meshrl.common.state.pool.workers.process_names import SERVICE_NAMES

NONE = "none"
ALL_SERVICES = tuple(SERVICE_NAMES.values())
MAX_NAMED_HOSTS = 6  # in a reason


def parse_services(text: str) -> tuple[str, ...]:
    """Return the services in `shards,sandboxes`, one of the two, or `none`; ConfigError."""
    if text == NONE:
        return ()
    words = text.split(",")
    for word in words:
        if word not in ALL_SERVICES:
            raise ConfigError(
                f"{word!r:.60} is not a service of a host",
                where="--services",
                fix=f"Choose from {', '.join(ALL_SERVICES)}, or {NONE}",
            )
    return tuple(word for word in ALL_SERVICES if word in words)


def format_services(services: Sequence[str]) -> str:
    """Return the text that `parse_services` reads."""
    return ",".join(services) or NONE


def explain_rejected_service(host: PoolHost, kind: str, requirements: JobRequirements) -> str:
    """Return why a host rejects a service of this kind, as a phrase that follows its name.

    Empty if it accepts the service, whether or not the host is alive.
    """
    if SERVICE_NAMES[kind] not in host.accepted_services:
        return f"accepts {' and '.join(host.accepted_services) or 'no services'}"
    if (
        kind != "sandbox"
        or not requirements.isolation_tier
        or host.isolation_tiers is None
        or has_sufficient_tier(host.isolation_tiers, requirements.isolation_tier)
    ):
        return ""
    if host.is_probing_isolation:
        return "is still testing its isolation"
    return f"has {' and '.join(host.isolation_tiers) or 'no isolation'}"


def explain_unplaced_service(
    hosts: Iterable[PoolHost], kind: str, requirements: JobRequirements
) -> str:
    """Return why no host accepts a service of this kind now, with the reason of each host.

    Empty if there are no hosts yet.
    """
    reasons = []
    for host in hosts:
        if host.drain_reason == HOST_LEFT:
            continue
        why = explain_rejected_service(host, kind, requirements)
        away = "drains" if host.alive and host.drain_reason else "is away"
        reasons.append(f"{host.name} {why or f'accepts them, but {away}'}")
    if not reasons:
        return ""
    inside = (
        f" with sandbox.tier = {requirements.isolation_tier}"
        if kind == "sandbox" and requirements.isolation_tier
        else ""
    )
    more = f"; and {len(reasons) - MAX_NAMED_HOSTS} more" if len(reasons) > MAX_NAMED_HOSTS else ""
    return (
        f"no host accepts its {SERVICE_NAMES[kind]}{inside} now: "
        f"{'; '.join(reasons[:MAX_NAMED_HOSTS])}{more}"
    )
