"""Runner of the checks of a job file's content; it reports the first mistake.

A check is a function of the job file that raises a ConfigError with the line and the fix.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshrl.common.job.cache_memory import AUTO
from meshrl.common.job.config import INITIAL
from meshrl.common.job.emulation import parse_engine_speed, parse_training_emulation
from meshrl.common.state.pool.demand.requirements import derive_requirements
from meshrl.job.checks.job_file import (
    algorithm,
    experts,
    files,
    judge_and_evaluation,
    optional_keys,
    sampling,
    sandbox,
    source_options,
)
from meshrl.job.job_file import MESSAGE_WITH_LOCATION, Check, JobFile
from meshrl.job.model_files import load_shape, load_shape_from, load_tokenizer

TENSOR_PARALLEL_KEY = "rollout.tensor_parallel"
SGLANG_TENSOR_PARALLEL_FLAGS = (
    "--tp",
    "--tp-size",
    "--tensor-parallel-size",
)  # equivalent flags of the engine


def check_buckets(job: JobFile) -> None:
    """Check that buckets rise, and that engines have slots for their batches."""
    rollout = job.config.rollout
    lengths = [bucket.max_tokens for bucket in rollout.buckets]
    if lengths != sorted(set(lengths)):
        raise job.make_error("rollout.buckets", "rollout.buckets must rise in max_tokens")
    for i, bucket in enumerate(rollout.buckets):
        if bucket.batch > rollout.slots:
            key = f"rollout.buckets[{i}].batch"
            wrong = f"{key} = {bucket.batch} must be between 1 and rollout.slots = {rollout.slots}"
            raise job.make_error(key, wrong)


def check_emulated_accelerators(job: JobFile) -> None:
    """Check that the accelerators which the job emulates are known."""
    config = job.config
    for key, pace, read in (
        ("rollout.emulate", config.rollout.emulate, parse_engine_speed),
        ("training.emulate", config.training.emulate, parse_training_emulation),
    ):
        if pace:
            with job.locate_errors(key, "{error.message}"):
                read(pace)


def check_cache_size(job: JobFile) -> None:
    """Check that the engine's cache has one size, and one that the engine knows."""
    rollout = job.config.rollout
    if rollout.kv_memory == AUTO:
        return
    if rollout.kv_tokens:
        wrong = "rollout.kv_memory and rollout.kv_tokens both set the size of the engine's cache"
        raise job.make_error("rollout.kv_memory", wrong, "Remove one of the two keys")
    if rollout.engine == "sglang":
        wrong = "rollout.kv_memory is for the built-in engine, and rollout.engine is 'sglang'"
        fix = "Set rollout.kv_tokens, or --mem-fraction-static in rollout.sglang_options"
        raise job.make_error("rollout.kv_memory", wrong, fix)


def check_workers(job: JobFile) -> None:
    """Check that the mesh has the workers that the job's roles take, and groups enough members."""
    config = job.config
    if config.min_group > config.algorithm.group_size:
        raise job.make_error(
            "algorithm.min_group", "algorithm.min_group exceeds algorithm.group_size"
        )
    requirements = derive_requirements(config.to_document())
    training = config.planner.training + config.training.ranks - 1
    engines = config.planner.min_rollout if requirements.needs_rollout else 0
    parts = [(training, "for training")]
    if engines > 1 or not requirements.can_time_slice:  # one engine shares the core's worker
        workers = engines * requirements.smallest_engine
        parts.append((workers, "for engines, which do not share a worker by time slices"))
    if requirements.needs_scoring and not requirements.can_share_scoring:
        parts.append((1, 'for frozen models, which share none with pool.colocate = "never"'))
    if (needed := sum(count for count, _ in parts)) > config.mesh.workers:
        roles = ", and ".join(f"{count} {role}" for count, role in parts)
        raise job.make_error(
            "mesh.workers",
            f"mesh.workers = {config.mesh.workers} is too low: the job needs {roles}",
            f"Set mesh.workers to {needed} or more",
        )


def check_pool(job: JobFile) -> None:
    """Check that the bounds of the job's workers leave room for its roles."""
    least, most = job.config.pool.workers.least, job.config.pool.workers.most
    floor = derive_requirements(job.config.to_document()).time_sliced_floor
    if most and most < least:
        raise job.make_error(
            "pool.workers.most", f"pool.workers.most = {most} is below pool.workers.least = {least}"
        )
    if most and most < floor:
        raise job.make_error(
            "pool.workers.most",
            f"pool.workers.most = {most}, but the job needs {floor}: one for each rank of "
            "its core, and those of instances without time slicing (engines with "
            "rollout.tensor_parallel above 1, or engines and frozen models with pool.colocate = "
            '"never")',
            "Raise pool.workers.most, or set it to 0 for no limit",
        )


def check_tensor_parallel(job: JobFile) -> None:
    """Check that degrees are powers of two that an engine here supports, or emulates."""
    rollout = job.config.rollout
    degrees = rollout.tensor_parallel
    if not degrees:
        raise job.make_error(
            TENSOR_PARALLEL_KEY,
            f"{TENSOR_PARALLEL_KEY} is empty",
            "Set [1], or the degrees that engines may have",
        )
    if odd := [degree for degree in degrees if degree & (degree - 1)]:
        raise job.make_error(
            TENSOR_PARALLEL_KEY, f"{TENSOR_PARALLEL_KEY} has {odd[0]}, which is not a power of two"
        )
    if max(degrees) == 1:
        return
    if rollout.engine != "sglang" and not rollout.emulate:
        wrong = (
            f"{TENSOR_PARALLEL_KEY} has {max(degrees)}, but the built-in engine computes on "
            "one worker"
        )
        fix = 'Set rollout.engine = "sglang", or set rollout.emulate to emulate an accelerator'
        raise job.make_error(TENSOR_PARALLEL_KEY, wrong, fix)
    if flag := next(
        (o for o in rollout.sglang_options if o.partition("=")[0] in SGLANG_TENSOR_PARALLEL_FLAGS),
        "",
    ):
        wrong = f"rollout.sglang_options has {flag}, which {TENSOR_PARALLEL_KEY} sets already"
        raise job.make_error("rollout.sglang_options", wrong, "Remove the option")


def check_heads_divisible(job: JobFile) -> None:
    """Check that each worker of an engine has as many heads as the others.

    An emulated engine represents another model than the one that it computes.
    """
    if job.config.rollout.emulate or max(job.config.rollout.tensor_parallel) == 1:
        return
    model = load_shape(job.config)
    for degree in job.config.rollout.tensor_parallel:
        shared = model.num_kv_heads % degree and degree % model.num_kv_heads
        if model.num_heads % degree or shared:
            raise job.make_error(
                TENSOR_PARALLEL_KEY,
                f"{TENSOR_PARALLEL_KEY} has {degree}, but the model's {model.num_heads} "
                f"heads and {model.num_kv_heads} key-value heads cannot be divided among "
                "that many workers",
                "Remove that degree",
            )


def check_frozen_models(job: JobFile) -> None:
    """Check the frozen models, and that those which the algorithm compares with are present."""
    config, declared = job.config, job.config.models.models_by_role
    if config.algorithm.kl_coefficient and "reference" not in declared:
        wrong = "algorithm.kl_coefficient needs models.reference, which the job lacks"
        fix = f"Set models.reference.path to {INITIAL!r} or a directory"
        raise job.make_error("algorithm.kl_coefficient", wrong, fix)
    if config.algorithm.name == "distill" and "teacher" not in declared:
        raise job.make_error("algorithm.name", "distill needs models.teacher, which the job lacks")
    for role, table in job.raw_document.get("models", {}).items():
        if "path" not in table:
            raise job.make_error(
                f"models.{role}",
                f"models.{role} has no path",
                "Set the path to a Hugging Face directory"
                + (f", or {INITIAL!r}" if role == "reference" else ""),
            )
    if {"reference", "teacher"} & set(declared) and config.rollout.temperature != 1:
        raise job.make_error(
            "rollout.temperature",
            "reference and teacher models are compared with samples at temperature 1, not "
            f"{config.rollout.temperature:g}",
        )
    for role, model in declared.items():
        if model.path != INITIAL:
            _check_frozen_model(job, role, Path(model.path))
        elif role != "reference":
            key = f"models.{role}.path"
            raise job.make_error(key, f"{key} = {INITIAL!r} is valid only for models.reference")


def _check_frozen_model(job: JobFile, role: str, directory: Path) -> None:
    """Check a frozen model's files, and that one used for comparison has the job's tokenizer."""
    key, tokenizer = f"models.{role}.path", job.config.model.tokenizer_file
    own = (directory / "tokenizer.json").is_file()
    if not (directory / "config.json").is_file():
        raise job.make_error(key, f"{directory} has no config.json")
    if role == "reward" and not own:
        raise job.make_error(key, f"{directory} has no tokenizer.json")
    if role != "reward" and own and tokenizer.is_file():
        ours = load_tokenizer(job, tokenizer, "model.tokenizer").vocabulary
        if not ours.items() <= load_tokenizer(job, directory, key).vocabulary.items():
            raise job.make_error(key, f"{directory} has another tokenizer than the model")


def check_model_shapes(job: JobFile) -> None:
    """Check that every model is described as one that the decoder implements."""
    described = {} if job.config.model.path else {"model.config": ""}
    for key, path in (described | {file.key: file.path for file in job.models}).items():
        with job.locate_errors(key, MESSAGE_WITH_LOCATION):
            load_shape_from(path, job.config.model.config)


VALUE_CHECKS: tuple[Check, ...] = (
    check_buckets,
    check_cache_size,
    check_emulated_accelerators,
    check_tensor_parallel,
    check_workers,
    check_pool,
    judge_and_evaluation.check_evaluation,
    algorithm.check_algorithm,
    sampling.check_sampling,
    sandbox.check_sandbox,  # options of rewards, before the rows that they name
)
FILE_CHECKS: tuple[Check, ...] = (  # which a run has copies of: they do not change
    check_frozen_models,
    judge_and_evaluation.check_judge,
    files.check_model,
    files.check_system_prompt,
    source_options.check_source_options,
    files.check_datasets,
    files.check_taskset,
    files.check_rewards,
    files.check_references,
)
SHAPE_CHECKS: tuple[Check, ...] = (  # of models that are there
    check_model_shapes,
    check_heads_divisible,
    experts.check_experts,
    optional_keys.check_optional_keys,
)


def complete_group_size(job: JobFile) -> JobFile:
    """Return a supervised job with groups of one trajectory; another job unchanged."""
    config = job.config
    if not config.is_supervised:
        if (
            config.algorithm.group_size < 2
            and config.algorithm.name not in algorithm.REWARDLESS_ALGORITHMS
        ):
            raise job.make_error(
                "algorithm.group_size",
                "algorithm.group_size must be at least 2: an advantage compares answers of a group",
            )
        return job
    if job.raw_document.get("algorithm", {}).get("group_size", 1) != 1:
        raise job.make_error("algorithm.group_size", "algorithm.group_size must be 1 for sft")
    if config.environment.verifiers:
        raise job.make_error(
            "environment.verifiers", "sft trains on rows of a dataset, not on tasks of verifiers"
        )
    return job.with_config(replace(config, algorithm=replace(config.algorithm, group_size=1)))


def check_job_file(job: JobFile) -> None:
    for one in VALUE_CHECKS + FILE_CHECKS + SHAPE_CHECKS:
        one(job)


def check_changed_document(job: JobFile) -> None:
    """Check the changeable keys of a run whose files stay."""
    for one in VALUE_CHECKS + SHAPE_CHECKS:
        one(job)
