"""Checks of the keys that most jobs leave out: adapters, trackers, the metrics' address."""

from __future__ import annotations

from common.errors import ConfigError
from common.model.projections import check_adapters
from common.ports import ports
from common.settings import OFF
from meshrl.job.checks.file.models import shape
from meshrl.job.loaded import JobFile
from meshrl.observe.recording import trackers


def check(job: JobFile) -> None:
    """Refuse what would otherwise end the job after it has begun."""
    config = job.config
    for name in trackers.wanted(config):
        with job.naming(f"tracking.{name}"):
            trackers.present(name)
    if config.mesh.metrics != OFF:
        with job.naming("mesh.metrics"):
            ports(config.mesh.metrics, "mesh.metrics")
    if config.lora.rank:
        try:
            check_adapters(shape(config), config.lora.rank, config.lora.targets)
        except ConfigError as error:
            place = error.where if error.where.startswith("lora.") else "lora"
            raise job.fail(place, f"{place}: {error.message}", error.fix) from error
