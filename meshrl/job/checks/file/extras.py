"""Checks of the keys that most jobs leave out: adapters, trackers, the metrics' address."""

from __future__ import annotations

import importlib.util
import sys

from common.base.errors import ConfigError
from common.base.host.ports import ports
from common.base.host.settings import OFF
from common.job.config import JobConfig
from common.model.architecture.projections import check_adapters
from meshrl.job.loaded import JobFile
from meshrl.job.model_files import shape

TRACKERS = ("tensorboard", "wandb", "trackio")


def check(job: JobFile) -> None:
    """Refuse what would otherwise end the job after it has begun."""
    config = job.config
    for name in wanted_trackers(config):
        with job.naming(f"tracking.{name}"):
            require_tracker(name)
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
    """The trackers that a job asks for."""
    return [name for name in TRACKERS if getattr(config.tracking, name)]


def require_tracker(name: str) -> None:
    """ConfigError, with the command that installs it, when a tracker's package is not there."""
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"tracking.{name}: the package {name} is not installed",
            fix=f"`{sys.executable} -m pip install 'meshrl[tracking]'`",
        )
