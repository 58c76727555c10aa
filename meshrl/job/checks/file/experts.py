"""Checks how a job file has the experts of a mixture divided among ranks.

`fail(key, message, fix)` makes the error that names the key's line.
"""

from __future__ import annotations

from collections.abc import Callable

from common.errors import ConfigError
from common.job.config import JobConfig
from common.job.pace import declared_pace
from common.model.config import ModelConfig
from meshrl.job.checks.file.models import shape

Fail = Callable[..., ConfigError]

SPLIT, ZEBRA, PACE = "training.expert_parallel", "training.zebra", "training.pace"


def check(config: JobConfig, fail: Fail) -> None:
    """Ranks and experts can be divided as it says, and there are such."""
    training = config.training
    zebra = training.zebra
    keys = {
        f"{ZEBRA}.attention": zebra.attention > 0,
        f"{ZEBRA}.auto": zebra.auto,
        SPLIT: training.expert_parallel > 1,
        PACE: declared_pace(training.pace) is not None,
    }
    key = next((key for key, given in keys.items() if given), None)
    if key is None:
        return
    model = shape(config.model.path, config.model.config)
    if not model.experts:
        raise fail(key, f"{key} is set, and the model is no mixture of experts", "Leave it out")
    if zebra.attention:
        _check_given(config, model, fail)
    else:
        _check_split(config, model, fail)
    if zebra.auto:
        _check_auto(config, fail)
    if keys[PACE] and training.ranks == 1:
        raise fail(
            PACE,
            f"{PACE} = {training.pace!r} is of ranks of a mixture, and training.ranks is 1",
            "Raise training.ranks, or set it to TOKENS_PER_S/UPDATE_MS",
        )


def _check_split(config: JobConfig, model: ModelConfig, fail: Fail) -> None:
    parallel, ranks = config.training.expert_parallel, config.training.ranks
    for count, what, fix in (
        (
            ranks,
            f"the {ranks} ranks of training.ranks",
            "Set it to training.ranks, or a part of it",
        ),
        (model.experts, f"the model's {model.experts} experts", "Set it to one that does"),
    ):
        if count % parallel:
            raise fail(SPLIT, f"{SPLIT} = {parallel} does not divide {what}", fix)


def _check_auto(config: JobConfig, fail: Fail) -> None:
    key, training = f"{ZEBRA}.auto", config.training
    if training.zebra.attention or training.zebra.hosted:
        given = "attention" if training.zebra.attention else "hosted"
        raise fail(
            f"{ZEBRA}.{given}",
            f"{ZEBRA}.{given} is set beside {key}, which has the planner find it",
            "Leave one of them out",
        )
    if training.ranks == 1:
        raise fail(
            "training.ranks",
            f"{key} divides ranks between two kinds of accelerators, and training.ranks is 1",
            "Raise it, or leave training.zebra out",
        )
    _check_trains(config, key, fail)


def _check_given(config: JobConfig, model: ModelConfig, fail: Fail) -> None:
    training, zebra = config.training, config.training.zebra
    if training.expert_parallel > 1:
        raise fail(SPLIT, f"{SPLIT} is set beside {ZEBRA}, which divides experts, too", "Set one")
    if zebra.attention >= training.ranks:
        raise fail(
            f"{ZEBRA}.attention",
            f"{ZEBRA}.attention = {zebra.attention} of {training.ranks} ranks leaves none for "
            "experts",
            f"Raise training.ranks, or set {SPLIT}, which divides experts among ranks all alike",
        )
    _check_trains(config, f"{ZEBRA}.attention", fail)
    _check_hosted(config, model, fail)


def _check_trains(config: JobConfig, key: str, fail: Fail) -> None:
    """Such a gang can train what the job does."""
    if config.algorithm.name == "ppo":
        raise fail(
            "algorithm.name",
            f"{ZEBRA} trains no critic, and ppo has one",
            "Choose an algorithm without one, or leave training.zebra out",
        )
    if config.training.pace and declared_pace(config.training.pace) is None:
        raise fail(
            PACE,
            f"{PACE} is of one kind of accelerators, and {ZEBRA} has two",
            "Set it to declared/SCALE, by which each rank has the pace of its own accelerator",
        )
    if config.lora.rank:
        raise fail(
            key,
            f"{ZEBRA} trains whole weights, and lora.rank = {config.lora.rank}",
            "Leave one of them out: adapters need no ranks for experts",
        )


def _check_hosted(config: JobConfig, model: ModelConfig, fail: Fail) -> None:
    zebra, layers = config.training.zebra, len(model.sparse_layers)
    key, hosted = f"{ZEBRA}.hosted", zebra.hosted
    if len(hosted) not in (0, 1, layers):
        raise fail(
            key,
            f"{key} has {len(hosted)} numbers, and the model {layers} mixture layers",
            "Give one for each of them, or one for all",
        )
    most = max(hosted, default=0) * zebra.attention
    if most > model.experts:
        raise fail(
            key,
            f"{key}: {zebra.attention} ranks would host {most} experts of a layer, which has "
            f"{model.experts}",
            "Lower it",
        )
    left, ranks = model.experts - min(hosted, default=0) * zebra.attention, config.training.ranks
    if left < ranks - zebra.attention:
        raise fail(
            "training.ranks",
            f"{ranks - zebra.attention} ranks would share {left} experts of a layer",
            "Lower training.ranks, or raise training.zebra.attention",
        )
