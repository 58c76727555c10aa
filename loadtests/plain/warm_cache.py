"""Weights of the plain loop's warm start, where a mesh looks for those of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from meshrl.common.job.bundle.job_data import JobData
from meshrl.job import bundle, job_reader
from meshrl.services.trainer.initialization import warm_start
from meshrl.services.trainer.initialization.initial_weights import build_cache_key, read_sources


def cache_weights(
    job: Path, changes: Sequence[str], probe: Path, cache: Path, state: dict[str, Tensor]
) -> None:
    """Put the weights into a cache from which a run of the job with these changes starts.

    Args:
        changes: KEY=VALUE, as of `meshrl run --set`.
        probe: An empty place for the job's bundle.
    """
    config, base = job_reader.load_config(job, list(changes))
    _, document = bundle.pack_bundle(config, base, probe)
    data = JobData.from_document(config.name, document, "")
    path = warm_start.build_cache_path(str(cache), build_cache_key(data), read_sources(data))
    warm_start.save_weights(path, state)
