"""Checks the keys of a job file that most jobs leave out: adapters, trackers, the metrics'
address.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from common.errors import ConfigError
from common.job.config import JobConfig
from common.model.projections import check_adapters
from common.ports import ports
from common.settings import OFF
from meshrl.job.checks.file import models
from meshrl.observe.recording import trackers

Fail = Callable[[str, str, str], ConfigError]  # key, message, fix


def check(config: JobConfig, fail: Fail) -> None:
    """ConfigError, by `fail`, for what would otherwise end the job after it has begun."""
    metrics = config.mesh.metrics
    checks: dict[str, Callable[[], object]] = {
        f"tracking.{name}": partial(trackers.present, name) for name in trackers.wanted(config)
    }
    if metrics != OFF:
        checks["mesh.metrics"] = lambda: ports(metrics, "mesh.metrics")
    if config.lora.rank:
        checks["lora"] = lambda: check_adapters(
            models.shape(config.model.path, config.model.config),
            config.lora.rank,
            config.lora.targets,
        )
    for key, look in checks.items():
        try:
            look()
        except ConfigError as error:
            place = error.where if error.where.startswith("lora.") else key
            raise fail(place, f"{place}: {error.message}", error.fix) from error
