"""Runs every check before a mesh starts and a run directory is made: what is wrong is said at once,
all of it.

A check is a function of the job file that raises a MeshError, with the place and what to do. Those
that wait for another process or a server run beside the others, each with a deadline of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from common.errors import MeshError
from meshrl.job.jobfile import JobFile
from meshrl.preflight import (
    devices,
    golds,
    graded,
    modules,
    outputs,
    programs,
    prompts,
    redis_server,
    texts,
    tokens,
    weights,
)
from meshrl.preflight.addresses import bind, metrics
from meshrl.preflight.together import raise_all

Check = Callable[[JobFile], None]

OF_THE_JOB: tuple[Check, ...] = (
    tokens.positions,
    tokens.vocabulary,
    tokens.stop,
    weights.whole,
    weights.quota,
    prompts.lengths,
    texts.written,
    graded.graded,
    golds.usable,
    outputs.writable,
    programs.packages,
    programs.sglang,
    programs.verifiers,
    programs.sandbox,
    programs.servers,
)
OF_THE_HOST: tuple[Check, ...] = (  # of a mesh of its own, of which there is this one alone
    programs.isolation,
)
OF_THE_MESH: tuple[Check, ...] = (  # that is to be started; a job that is submitted finds one
    devices.present,
    bind,
    metrics,
    redis_server.answers,
)


def check(job: JobFile, *, starts_mesh: bool = True) -> None:
    """Returns if the job can start, as far as this host can tell before it does; else the error of
    the only check that failed, or a ConfigError with the texts of all that did.
    """
    others = OF_THE_JOB + (OF_THE_HOST + OF_THE_MESH if starts_mesh else ())
    with ThreadPoolExecutor(len(others)) as pool:
        begun = [pool.submit(_failure, check, job) for check in others]
        # In this thread, which Ctrl-C interrupts: the author's code may take its time.
        own = _failure(modules.imported, job)
        found = [*(future.result() for future in begun), own]
    raise_all(error for error in found if error is not None)


def check_mesh(job: JobFile) -> None:
    """The same of the mesh alone, for a job that has begun."""
    found = [_failure(check, job) for check in OF_THE_MESH]
    raise_all(error for error in found if error is not None)


def _failure(check: Check, job: JobFile) -> MeshError | None:
    try:
        check(job)
    except MeshError as error:
        return error
    return None
