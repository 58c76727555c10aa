"""Checks how a job file has the experts of a mixture divided among ranks."""

from __future__ import annotations

from meshrl.common.job.pace import declared_pace
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.job.loaded import JobFile
from meshrl.job.model_files import shape

SPLIT, ZEBRA, PACE = "training.expert_parallel", "training.zebra", "training.pace"


def check(job: JobFile) -> None:
    """Ranks and experts can be divided as it says, and there are such."""
    training = job.config.training
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
    model = shape(job.config)
    if not model.experts:
        raise job.fail(key, f"{key} is set, and the model is no mixture of experts", "Leave it out")
    if zebra.attention:
        _check_given(job, model)
    else:
        _check_split(job, model)
    if zebra.auto:
        _check_auto(job)
    if keys[PACE] and training.ranks == 1:
        wrong = f"{PACE} = {training.pace!r} is of ranks of a mixture, and training.ranks is 1"
        raise job.fail(PACE, wrong, "Raise training.ranks, or set it to TOKENS_PER_S/UPDATE_MS")


def _check_split(job: JobFile, model: ModelConfig) -> None:
    parallel, ranks = job.config.training.expert_parallel, job.config.training.ranks
    for count, what, fix in (
        (
            ranks,
            f"the {ranks} ranks of training.ranks",
            "Set it to training.ranks, or a part of it",
        ),
        (model.experts, f"the model's {model.experts} experts", "Set it to one that does"),
    ):
        if count % parallel:
            raise job.fail(SPLIT, f"{SPLIT} = {parallel} does not divide {what}", fix)


def _check_auto(job: JobFile) -> None:
    key, training = f"{ZEBRA}.auto", job.config.training
    if training.zebra.attention or training.zebra.hosted:
        given = "attention" if training.zebra.attention else "hosted"
        wrong = f"{ZEBRA}.{given} is set beside {key}, which has the planner find it"
        raise job.fail(f"{ZEBRA}.{given}", wrong, "Leave one of them out")
    if training.ranks == 1:
        wrong = f"{key} divides ranks between two kinds of accelerators, and training.ranks is 1"
        raise job.fail("training.ranks", wrong, "Raise it, or leave training.zebra out")
    _check_trains(job, key)


def _check_given(job: JobFile, model: ModelConfig) -> None:
    training, zebra = job.config.training, job.config.training.zebra
    if training.expert_parallel > 1:
        raise job.fail(
            SPLIT, f"{SPLIT} is set beside {ZEBRA}, which divides experts, too", "Set one"
        )
    if zebra.attention >= training.ranks:
        raise job.fail(
            f"{ZEBRA}.attention",
            f"{ZEBRA}.attention = {zebra.attention} of {training.ranks} ranks leaves none for "
            "experts",
            f"Raise training.ranks, or set {SPLIT}, which divides experts among ranks all alike",
        )
    _check_trains(job, f"{ZEBRA}.attention")
    _check_hosted(job, model)


def _check_trains(job: JobFile, key: str) -> None:
    """Such a gang can train what the job does."""
    if job.config.algorithm.name == "ppo":
        wrong = f"{ZEBRA} trains no critic, and ppo has one"
        fix = "Choose an algorithm without one, or leave training.zebra out"
        raise job.fail("algorithm.name", wrong, fix)
    if job.config.training.pace and declared_pace(job.config.training.pace) is None:
        wrong = f"{PACE} is of one kind of accelerators, and {ZEBRA} has two"
        fix = "Set it to declared/SCALE, by which each rank has the pace of its own accelerator"
        raise job.fail(PACE, wrong, fix)
    if job.config.lora.rank:
        wrong = f"{ZEBRA} trains whole weights, and lora.rank = {job.config.lora.rank}"
        raise job.fail(key, wrong, "Leave one of them out: adapters need no ranks for experts")


def _check_hosted(job: JobFile, model: ModelConfig) -> None:
    zebra, layers = job.config.training.zebra, len(model.sparse_layers)
    key, hosted = f"{ZEBRA}.hosted", zebra.hosted
    if len(hosted) not in (0, 1, layers):
        wrong = f"{key} has {len(hosted)} numbers, and the model {layers} mixture layers"
        raise job.fail(key, wrong, "Give one for each of them, or one for all")
    most = max(hosted, default=0) * zebra.attention
    if most > model.experts:
        raise job.fail(
            key,
            f"{key}: {zebra.attention} ranks would host {most} experts of a layer, which has "
            f"{model.experts}",
            "Lower it",
        )
    left, ranks = (
        model.experts - min(hosted, default=0) * zebra.attention,
        job.config.training.ranks,
    )
    if left < ranks - zebra.attention:
        wrong = f"{ranks - zebra.attention} ranks would share {left} experts of a layer"
        fix = "Lower training.ranks, or raise training.zebra.attention"
        raise job.fail("training.ranks", wrong, fix)
