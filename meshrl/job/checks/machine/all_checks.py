"""Runs every check before a mesh starts and a run directory is made: what is wrong is said at once,
all of it.

A check is a function of the job file that raises a MeshError, with the place and what to do. Those
that wait for another process or a server run beside the others, each with a deadline of its own.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from meshrl.common.base.errors import MeshError
from meshrl.job.checks.machine import modules, outputs, programs, tokens, weights
from meshrl.job.checks.machine.rows import golds, graded, prompts, texts
from meshrl.job.checks.machine.together import raise_all
from meshrl.job.loaded import Check, JobFile

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


def check(job: JobFile, beside: tuple[Check, ...] = ()) -> None:
    """Returns if the job can start, as far as this host can tell before it does; else the error of
    the only check that failed, or a ConfigError with the texts of all that did. `beside`: checks of
    the mesh that is to be started; a job that is submitted finds one.
    """
    others = OF_THE_JOB + beside
    with ThreadPoolExecutor(len(others)) as pool:
        begun = [pool.submit(failures, (check,), job) for check in others]
        # In this thread, which Ctrl-C interrupts: the author's code may take its time.
        own = failures((modules.imported,), job)
        raise_all([*chain.from_iterable(future.result() for future in begun), *own])


def failures(checks: tuple[Check, ...], job: JobFile) -> list[MeshError]:
    """The errors of those checks that fail."""
    found = []
    for check in checks:
        try:
            check(job)
        except MeshError as error:
            found.append(error)
    return found
