"""Checks that numbers of a job go together: buckets, paces, workers, the job's part of a pool, and
the degrees of tensor parallelism that engines may have.
"""

from __future__ import annotations

from meshrl.common.job.pace import profile, training_pace
from meshrl.common.state.pool.demand.needs import need_of
from meshrl.common.state.pool.placing.fitting import tight_floor
from meshrl.job.loaded import JobFile
from meshrl.job.model_files import shape

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
