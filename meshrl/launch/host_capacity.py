"""Capacity that a host offers its mesh: workers, and services of jobs."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.common.base.errors import ConfigError
from meshrl.common.state.pool.scheduling.host_services import ALL_SERVICES, parse_services

CPU = "cpu"
DEFAULT_HEAD_WORKERS = 3  # CPU slots of `meshrl up`, unless another number is requested


@dataclass(frozen=True)
class HostCapacity:
    """Capacity as the command line states it. `workers` 0 of `device` cpu: none."""

    workers: int
    device: str
    accepted_services: tuple[str, ...]


def parse_host_capacity(
    workers: int, device: str, no_workers: bool, services: str | None, default_workers: int = 0
) -> HostCapacity:
    """Return the capacity from the options of `meshrl up` and `meshrl join`.

    `no_workers`: --no-workers; `default_workers`: the CPU slots of a host that states no number.
    Raises ConfigError for options that contradict each other or leave nothing to offer.
    """
    accepted_services = parse_services(services) if services is not None else ALL_SERVICES
    if no_workers and workers:
        wrong = f"--no-workers and --workers {workers} contradict each other"
        raise ConfigError(wrong, where="--no-workers", fix="Remove one of them")
    if no_workers and device != CPU:
        wrong = f"--no-workers and --device {device} contradict each other"
        raise ConfigError(wrong, where="--no-workers", fix="Remove one of them")
    if not no_workers and device == CPU:
        workers = workers or default_workers
    if not accepted_services and not workers and device == CPU:
        raise ConfigError(
            "this host offers neither workers nor services",
            where="--services",
            fix="Set --workers N, or --services shards,sandboxes",
        )
    return HostCapacity(workers, device, accepted_services)
