"""Checks of the keys that most jobs leave out: adapters, trackers, the metrics' address."""

from __future__ import annotations

import importlib.util
import sys

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.host.listen_addresses import parse_listen_address
from meshrl.common.base.host.settings import METRICS_OFF
from meshrl.common.job.config import JobConfig
from meshrl.common.model.architecture.projections import check_adapters
from meshrl.job.checks.job_file import tracker_logins
from meshrl.job.job_file import JobFile
from meshrl.job.model_files import load_shape

TRACKERS = ("tensorboard", "wandb", "trackio")


def check_optional_keys(job: JobFile) -> None:
    """Reject values that would otherwise end the job after it has begun."""
    config = job.config
    for name in list_trackers(config):
        if importlib.util.find_spec(name) is None:
            key = f"tracking.{name}"
            wrong = f"{key}: the package {name} is not installed"
            raise job.make_error(
                key, wrong, f"Run `{sys.executable} -m pip install 'meshrl[tracking]'`"
            )
    if config.tracking.wandb and (why := tracker_logins.explain_missing_wandb_login()):
        raise job.make_error("tracking.wandb", f"tracking.wandb: {why}", tracker_logins.LOGIN_FIX)
    if config.mesh.metrics != METRICS_OFF:
        with job.locate_errors("mesh.metrics"):
            parse_listen_address(config.mesh.metrics, "mesh.metrics")
    if config.lora.rank:
        try:
            check_adapters(load_shape(config), config.lora.rank, config.lora.targets)
        except ConfigError as error:
            place = error.where if error.where.startswith("lora.") else "lora"
            raise job.make_error(place, f"{place}: {error.message}", error.fix) from error


def list_trackers(config: JobConfig) -> list[str]:
    return [name for name in TRACKERS if getattr(config.tracking, name)]
