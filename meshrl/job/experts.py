"""Checks over how many ranks a job file has the experts of a mixture split.

`fail(key, message, fix)` makes the error that names the key's line.
"""

from __future__ import annotations

from collections.abc import Callable

from common.errors import ConfigError
from common.job.config import JobConfig
from meshrl.job.models import shape

Fail = Callable[..., ConfigError]

KEY = "training.expert_parallel"


def check(config: JobConfig, fail: Fail) -> None:
    """Ranks and experts can be divided alike, and there are such."""
    parallel, ranks = config.training.expert_parallel, config.training.ranks
    if parallel == 1:
        return
    model = shape(config.model.path, config.model.config)
    if not model.experts:
        raise fail(
            KEY, f"{KEY} = {parallel}, and the model is no mixture of experts", "Leave it out"
        )
    for count, what, fix in (
        (
            ranks,
            f"the {ranks} ranks of training.ranks",
            "Set it to training.ranks, or a part of it",
        ),
        (model.experts, f"the model's {model.experts} experts", "Set it to one that does"),
    ):
        if count % parallel:
            raise fail(KEY, f"{KEY} = {parallel} does not divide {what}", fix)
