"""Checks of the keys that most jobs leave out: adapters, trackers, the metrics' address."""

from __future__ import annotations

import importlib.util
import sys

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.host.ports import ports
from meshrl.common.base.host.settings import OFF
from meshrl.common.job.config import JobConfig
from meshrl.common.model.architecture.projections import check_adapters
from meshrl.job.loaded import JobFile
from meshrl.job.model_files import shape

TRACKERS = ("tensorboard", "wandb", "trackio")


def check(job: JobFile) -> None:
    """Refuse what would otherwise end the job after it has begun."""
    config = job.config
    for name in wanted_trackers(config):
        if importlib.util.find_spec(name) is None:
            key = f"tracking.{name}"
            wrong = f"{key}: the package {name} is not installed"
            raise job.fail(key, wrong, f"`{sys.executable} -m pip install 'meshrl[tracking]'`")
    if config.mesh.metrics != OFF:
        with job.naming("mesh.metrics"):
            ports(config.mesh.metrics, "mesh.metrics")
    if config.lora.rank:
        try:
            check_adapters(shape(config), config.lora.rank, config.lora.targets)
        except ConfigError as error:
            place = error.where if error.where.startswith("lora.") else "lora"
            raise job.fail(place, f"{place}: {error.message}", error.fix) from error


def wanted_trackers(config: JobConfig) -> list[str]:
    return [name for name in TRACKERS if getattr(config.tracking, name)]
