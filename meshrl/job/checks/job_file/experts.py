"""Checks of the division of an MoE model's experts among ranks."""

from __future__ import annotations

from meshrl.common.job.emulation import parse_emulation_scale
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.job.job_file import JobFile
from meshrl.job.model_files import load_shape

EXPERT_PARALLEL_KEY, ZEBRA_TABLE, TRAINING_EMULATE_KEY = (
    "training.expert_parallel",
    "training.zebra",
    "training.emulate",
)


def check_experts(job: JobFile) -> None:
    """Check that the job's ranks and experts exist and can be divided as it states."""
    training = job.config.training
    zebra = training.zebra
    keys = {
        f"{ZEBRA_TABLE}.attention": zebra.attention > 0,
        f"{ZEBRA_TABLE}.auto": zebra.auto,
        EXPERT_PARALLEL_KEY: training.expert_parallel > 1,
        TRAINING_EMULATE_KEY: parse_emulation_scale(training.emulate) is not None,
    }
    key = next((key for key, is_set in keys.items() if is_set), None)
    if key is None:
        return
    model = load_shape(job.config)
    if not model.num_experts:
        raise job.make_error(
            key, f"{key} is set, but the model is not a mixture of experts", "Remove the key"
        )
    if zebra.attention:
        _check_zebra(job, model)
    else:
        _check_expert_parallel(job, model)
    if zebra.auto:
        _check_zebra_auto(job)
    if keys[TRAINING_EMULATE_KEY] and training.ranks == 1:
        wrong = (
            f"{TRAINING_EMULATE_KEY} = {training.emulate!r} emulates the ranks of a mixture "
            "of experts, but training.ranks is 1"
        )
        raise job.make_error(
            TRAINING_EMULATE_KEY,
            wrong,
            "Raise training.ranks, or set training.emulate to TOKENS_PER_S/UPDATE_MS",
        )


def _check_expert_parallel(job: JobFile, model: ModelConfig) -> None:
    parallel, ranks = job.config.training.expert_parallel, job.config.training.ranks
    for count, what, fix in (
        (
            ranks,
            f"the {ranks} ranks of training.ranks",
            "Set it to training.ranks, or to a divisor of it",
        ),
        (
            model.num_experts,
            f"the model's {model.num_experts} experts",
            "Set it to a divisor of that number",
        ),
    ):
        if count % parallel:
            raise job.make_error(
                EXPERT_PARALLEL_KEY,
                f"{EXPERT_PARALLEL_KEY} = {parallel} does not divide {what}",
                fix,
            )


def _check_zebra_auto(job: JobFile) -> None:
    key, training = f"{ZEBRA_TABLE}.auto", job.config.training
    if training.zebra.attention or training.zebra.hosted:
        option = "attention" if training.zebra.attention else "hosted"
        wrong = f"{ZEBRA_TABLE}.{option} conflicts with {key}, which makes the planner choose it"
        raise job.make_error(f"{ZEBRA_TABLE}.{option}", wrong, "Remove one of them")
    if training.ranks == 1:
        wrong = f"{key} divides ranks between two kinds of accelerators, but training.ranks is 1"
        raise job.make_error(
            "training.ranks", wrong, "Raise training.ranks, or remove training.zebra"
        )
    _check_zebra_supports_job(job, key)


def _check_zebra(job: JobFile, model: ModelConfig) -> None:
    training, zebra = job.config.training, job.config.training.zebra
    if training.expert_parallel > 1:
        raise job.make_error(
            EXPERT_PARALLEL_KEY,
            f"{EXPERT_PARALLEL_KEY} conflicts with {ZEBRA_TABLE}, which also divides experts",
            "Set only one of them",
        )
    if zebra.attention >= training.ranks:
        raise job.make_error(
            f"{ZEBRA_TABLE}.attention",
            f"{ZEBRA_TABLE}.attention = {zebra.attention} of {training.ranks} ranks leaves "
            "no rank for experts",
            f"Raise training.ranks, or set {EXPERT_PARALLEL_KEY}, which divides experts "
            "among uniform ranks",
        )
    _check_zebra_supports_job(job, f"{ZEBRA_TABLE}.attention")
    _check_hosted_experts(job, model)


def _check_zebra_supports_job(job: JobFile, key: str) -> None:
    """Check that such a gang can train the job."""
    if job.config.algorithm.name == "ppo":
        wrong = f"{ZEBRA_TABLE} trains no critic, which ppo needs"
        fix = "Choose an algorithm without a critic, or remove training.zebra"
        raise job.make_error("algorithm.name", wrong, fix)
    if job.config.training.emulate and parse_emulation_scale(job.config.training.emulate) is None:
        wrong = (
            f"{TRAINING_EMULATE_KEY} emulates one kind of accelerators, but {ZEBRA_TABLE} has two"
        )
        fix = "Set it to declared/SCALE, which gives each rank the speed of its own accelerator"
        raise job.make_error(TRAINING_EMULATE_KEY, wrong, fix)
    if job.config.lora.rank:
        wrong = f"{ZEBRA_TABLE} trains full weights, but lora.rank = {job.config.lora.rank}"
        raise job.make_error(key, wrong, "Remove one of them: adapters need no ranks for experts")


def _check_hosted_experts(job: JobFile, model: ModelConfig) -> None:
    zebra, layers = job.config.training.zebra, len(model.sparse_layers)
    key, hosted = f"{ZEBRA_TABLE}.hosted", zebra.hosted
    if len(hosted) not in (0, 1, layers):
        wrong = f"{key} has {len(hosted)} numbers, but the model has {layers} MoE layers"
        raise job.make_error(key, wrong, "Give one number for each layer, or one for all")
    most = max(hosted, default=0) * zebra.attention
    if most > model.num_experts:
        raise job.make_error(
            key,
            f"{key}: {zebra.attention} ranks would host {most} experts of a layer, which has "
            f"{model.num_experts}",
            "Lower the numbers",
        )
    shared_experts, ranks = (
        model.num_experts - min(hosted, default=0) * zebra.attention,
        job.config.training.ranks,
    )
    if shared_experts < ranks - zebra.attention:
        wrong = f"{ranks - zebra.attention} ranks would share {shared_experts} experts of a layer"
        fix = "Lower training.ranks, or raise training.zebra.attention"
        raise job.make_error("training.ranks", wrong, fix)
