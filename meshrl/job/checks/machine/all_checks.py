"""Runs every check before a mesh starts and a run directory is made: what is wrong is said at once,
all of it.

A check is a function of the job file that raises a MeshError, with the place and what to do. Those
that wait for another process or a server run beside the others, each with a deadline of its own.
"""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from meshrl.common.base.errors import ConfigError, MeshError
from meshrl.common.base.files.at_url import AtUrl, without_secrets
from meshrl.common.model.files import checkpoint_files
from meshrl.job.checks.machine import modules, programs, tokens
from meshrl.job.checks.machine.rows import golds, graded, prompts, texts
from meshrl.job.checks.machine.together import raise_all
from meshrl.job.checks.machine.tokens import model_at
from meshrl.job.loaded import PLACED, Check, JobFile
from meshrl.job.model_files import size

GIB = 1 << 30
READ_BYTES = 1 << 28  # weights up to this size are read; larger ones are looked at when loaded


def whole(job: JobFile) -> None:
    """Each tensor lies there, in its shape and a floating-point type; no file is cut short, and no
    weight of a small model is NaN or infinite.
    """
    for file in job.models:
        path = Path(file.path)
        with job.naming(file.key, PLACED):
            checkpoint_files.check(path, model_at(job, file.path))
            if sum(f.stat().st_size for f in checkpoint_files.files(path)) <= READ_BYTES:
                checkpoint_files.check_finite(path)


def quota(job: JobFile) -> None:
    """The versions that the run has at a time have room in `weights.quota_gb`: those of the kept
    checkpoints, the current one, and the next.
    """
    config, allowed = job.config, job.config.weights.quota_gb
    if not allowed or config.lora.rank or not config.budget.steps:
        return
    steps, every = config.budget.steps, config.training.checkpoint_every
    kept = min(config.training.keep_checkpoints, 1 + -(-steps // every))
    versions = min(steps, kept + 2 if every > 1 else kept + 1)
    width = 2 if config.rollout.dtype == "bfloat16" else 4
    needed = versions * size(config) * width / GIB
    if needed > allowed:
        raise job.fail(
            "weights.quota_gb",
            f"weights.quota_gb = {allowed:g} GiB are too few for {versions} versions of "
            f"{size(config) * width / GIB:.3g} GiB, which the run has at a time: its kept "
            "checkpoints, the current one and the next",
            f"Take {needed:.3g} or more, or lower training.keep_checkpoints",
        )


def writable(job: JobFile) -> None:
    """ConfigError with what the place's server said when a file cannot be written and removed
    there.
    """
    for key, place in (("out", job.config.out_url), ("weights.copies", job.config.weights.copies)):
        if place:
            _tried(job, key, place)


def _tried(job: JobFile, key: str, url: str) -> None:
    if "::" in url or without_secrets(url) != url.rstrip("/"):
        raise ConfigError(  # which shows the URL to nobody
            "a URL with a user, a password or a query in it, or a chain of URLs (::), which may "
            "hide one, would stand in the run's files",
            where=key,
            fix="Give credentials in the environment, as the storage's client reads them",
        )
    try:
        there = AtUrl(url, key, "the place")
        probe = f".probe-{uuid.uuid4().hex}"
        there.place_content(probe, b"may this host write here?")
        there.discard(probe)
    except MeshError as error:
        raise job.fail(key, error.message, error.fix) from error


OF_THE_JOB: tuple[Check, ...] = (
    tokens.positions,
    tokens.vocabulary,
    tokens.stop,
    whole,
    quota,
    prompts.lengths,
    texts.written,
    graded.graded,
    golds.usable,
    writable,
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
