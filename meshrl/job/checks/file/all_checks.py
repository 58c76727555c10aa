"""Runs the checks of what a job file says; the first mistake is told.

A check is a function of the job file that raises a ConfigError with the line and what to do.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshrl.common.job.config import INITIAL
from meshrl.common.job.pace import profile, training_pace
from meshrl.common.state.pool.demand.needs import need_of
from meshrl.common.state.pool.placing.fitting import tight_floor
from meshrl.job.checks.file import algorithm, experts, extras, files, judges, sandbox
from meshrl.job.loaded import PLACED, Check, JobFile
from meshrl.job.model_files import loaded, shape, shape_at

KEY = "rollout.tensor_parallel"
OF_SGLANG = ("--tp", "--tp-size", "--tensor-parallel-size")  # its flags that say the same


def buckets(job: JobFile) -> None:
    """Check that buckets rise, and that engines have slots for their batches."""
    rollout = job.config.rollout
    lengths = [bucket.max_tokens for bucket in rollout.buckets]
    if lengths != sorted(set(lengths)):
        raise job.fail("rollout.buckets", "rollout.buckets must rise in max_tokens")
    for i, bucket in enumerate(rollout.buckets):
        if bucket.batch > rollout.slots:
            key = f"rollout.buckets[{i}].batch"
            wrong = f"{key} = {bucket.batch} must lie in 1 to rollout.slots = {rollout.slots}"
            raise job.fail(key, wrong)


def paces(job: JobFile) -> None:
    """Check that accelerators which the job is paced by are known."""
    config = job.config
    for key, pace, read in (
        ("rollout.pace", config.rollout.pace, profile),
        ("training.pace", config.training.pace, training_pace),
    ):
        if pace:
            with job.naming(key, "{error.message}"):
                read(pace)


def workers(job: JobFile) -> None:
    """Check that the mesh has the workers that the job's roles take, and groups enough members."""
    config = job.config
    if config.min_group > config.algorithm.group_size:
        raise job.fail("algorithm.min_group", "algorithm.min_group exceeds the group size")
    scoring = int(bool(config.models.declared))
    training = config.planner.training + config.training.ranks - 1
    rollout = config.planner.min_rollout * min(config.rollout.tensor_parallel)
    if training + rollout + scoring > config.mesh.workers:
        raise job.fail(
            "mesh.workers",
            f"mesh.workers = {config.mesh.workers} are too few for {training} "
            f"that train and {rollout} that roll out"
            + (", and one for the job's frozen models" if scoring else ""),
        )


def pool(job: JobFile) -> None:
    """Check that the bounds of the job's workers leave room for its roles."""
    least, most = job.config.pool.workers.least, job.config.pool.workers.most
    floor = tight_floor(need_of(job.config.document()))
    if most and most < least:
        raise job.fail(
            "pool.workers.most",
            f"pool.workers.most = {most} is below pool.workers.least = {least}",
        )
    if most and most < floor:
        raise job.fail(
            "pool.workers.most",
            f"pool.workers.most = {most}, and the job takes {floor}: one for each rank of its "
            "core, one for frozen models, and those of an engine that takes no turns (sglang, "
            "or rollout.tensor_parallel above 1)",
            "Give it more, or 0 for as many as there are",
        )


def degrees(job: JobFile) -> None:
    """Degrees are powers of two that something here computes with, or imitates."""
    rollout = job.config.rollout
    given = rollout.tensor_parallel
    if not given:
        raise job.fail(KEY, f"{KEY} is empty", "Set [1], or the degrees that engines may have")
    if odd := [degree for degree in given if degree & (degree - 1)]:
        raise job.fail(KEY, f"{KEY} has {odd[0]}, which is no power of two")
    if max(given) == 1:
        return
    if rollout.engine != "sglang" and not rollout.pace:
        wrong = f"{KEY} has {max(given)}, and the built-in engine computes on one worker"
        fix = 'Set rollout.engine = "sglang", or rollout.pace to imitate an accelerator'
        raise job.fail(KEY, wrong, fix)
    if flag := next((o for o in rollout.sglang_options if o.partition("=")[0] in OF_SGLANG), ""):
        wrong = f"rollout.sglang_options has {flag}, which {KEY} says already"
        raise job.fail("rollout.sglang_options", wrong, "Leave it out")


def divides(job: JobFile) -> None:
    """Each worker of an engine has as many heads as the others. A paced engine stands for another
    model than the one that it computes.
    """
    if job.config.rollout.pace or max(job.config.rollout.tensor_parallel) == 1:
        return
    model = shape(job.config)
    for degree in job.config.rollout.tensor_parallel:
        shared = model.kv_heads % degree and degree % model.kv_heads
        if model.heads % degree or shared:
            raise job.fail(
                KEY,
                f"{KEY} has {degree}, and the model's {model.heads} heads with {model.kv_heads} of "
                "keys and values cannot be divided among so many workers",
                "Leave that degree out",
            )


def declared(job: JobFile) -> None:
    """Check the frozen models, and that those are there which the algorithm compares with."""
    config, declared = job.config, job.config.models.declared
    if config.algorithm.kl_coefficient and "reference" not in declared:
        wrong = "algorithm.kl_coefficient compares with models.reference, which the job has not"
        fix = f"Set models.reference.path, to {INITIAL!r} or a directory"
        raise job.fail("algorithm.kl_coefficient", wrong, fix)
    if config.algorithm.name == "distill" and "teacher" not in declared:
        raise job.fail(
            "algorithm.name", "distill learns from models.teacher, which the job has not"
        )
    for role, table in job.given.get("models", {}).items():
        if "path" not in table:
            raise job.fail(
                f"models.{role}",
                f"models.{role} has no path",
                "Name a Hugging Face directory"
                + (f", or {INITIAL!r}" if role == "reference" else ""),
            )
    if {"reference", "teacher"} & set(declared) and config.rollout.temperature != 1:
        raise job.fail(
            "rollout.temperature",
            "reference and teacher are compared with what the model samples at temperature 1, not "
            f"{config.rollout.temperature:g}",
        )
    for role, model in declared.items():
        if model.path != INITIAL:
            _directory(job, role, Path(model.path))
        elif role != "reference":
            key = f"models.{role}.path"
            raise job.fail(key, f"{key} = {INITIAL!r} is for the reference alone")


def _directory(job: JobFile, role: str, place: Path) -> None:
    """Check a frozen model's files, and that one which is compared with has the job's tokenizer."""
    key, tokenizer = f"models.{role}.path", job.config.model.tokenizer_file
    own = (place / "tokenizer.json").is_file()
    if not (place / "config.json").is_file():
        raise job.fail(key, f"{place} holds no config.json")
    if role == "reward" and not own:
        raise job.fail(key, f"{place} holds no tokenizer.json")
    if role != "reward" and own and tokenizer.is_file():
        ours = loaded(job, tokenizer, "model.tokenizer").vocabulary
        if not ours.items() <= loaded(job, place, key).vocabulary.items():
            raise job.fail(key, f"{place} has another tokenizer than the model")


def shapes(job: JobFile) -> None:
    """Check that every model is described as one that the decoder implements."""
    described = {} if job.config.model.path else {"model.config": ""}
    for key, path in (described | {file.key: file.path for file in job.models}).items():
        with job.naming(key, PLACED):
            shape_at(path, job.config.model.config)


NUMBERS: tuple[Check, ...] = (
    buckets,
    paces,
    degrees,
    workers,
    pool,
    judges.evaluation,
    algorithm.check,
    sandbox.check,  # options of rewards, before the rows that they name
)
FILES: tuple[Check, ...] = (  # which a run has copies of: they do not change
    declared,
    judges.judge,
    files.model,
    files.rows_of_all,
    files.taskset,
    files.rewards,
    files.references_of_all,
)
SHAPES: tuple[Check, ...] = (  # of models that are there
    shapes,
    divides,
    experts.check,
    extras.check,
)


def completed(job: JobFile) -> JobFile:
    """Return a job of given answers with groups of one trajectory; another one as it is."""
    config = job.config
    if not config.supervised:
        if config.algorithm.group_size < 2 and config.algorithm.name not in algorithm.REWARDLESS:
            raise job.fail(
                "algorithm.group_size",
                "algorithm.group_size must be at least 2: an advantage compares",
            )
        return job
    if job.given.get("algorithm", {}).get("group_size", 1) != 1:
        raise job.fail("algorithm.group_size", "algorithm.group_size: of sft it is 1")
    if config.environment.verifiers:
        raise job.fail("environment.verifiers", "sft learns rows, which tasks of verifiers are not")
    return job.with_config(replace(config, algorithm=replace(config.algorithm, group_size=1)))


def check(job: JobFile) -> None:
    for one in NUMBERS + FILES + SHAPES:
        one(job)


def check_changed(job: JobFile) -> None:
    """Check what may change of a run whose files stay."""
    for one in NUMBERS + SHAPES:
        one(job)
