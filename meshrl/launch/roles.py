"""What a host gives its mesh: workers, and the services of jobs that may be placed there."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.common.base.errors import ConfigError
from meshrl.common.state.pool.placing.taking import ALL, taken

CPU = "cpu"
OF_A_HEAD = 3  # CPU slots of `meshrl up`, unless another number is asked for


@dataclass(frozen=True)
class HostRole:
    """As the command line says it. `workers` 0 of `device` cpu: none."""

    workers: int
    device: str
    takes: tuple[str, ...]


def role(
    workers: int, device: str, none: bool, services: str | None, otherwise: int = 0
) -> HostRole:
    """What the options of `meshrl up` and `meshrl join` come to; `none`: --no-workers, `otherwise`:
    the CPU slots of a host that does not say how many. ConfigError for those that contradict each
    other, or leave nothing to give.
    """
    takes = taken(services) if services is not None else ALL
    if none and workers:
        wrong = f"--no-workers with --workers {workers}: a host without workers has none"
        raise ConfigError(wrong, where="--no-workers", fix="Leave one of them out")
    if none and device != CPU:
        wrong = f"--no-workers with --device {device}: a host without workers has no device"
        raise ConfigError(wrong, where="--no-workers", fix="Leave one of them out")
    if not none and device == CPU:
        workers = workers or otherwise
    if not takes and not workers and device == CPU:
        raise ConfigError(
            "this host would give the mesh nothing: neither workers nor services",
            where="--services",
            fix="Give it --workers N, or --services shards,sandboxes",
        )
    return HostRole(workers, device, takes)
