"""Runner of every check before a mesh starts and a run directory is made: it reports all errors.

A check is a function of the job file that raises a MeshError, with the place and the fix. Checks
that wait for another process or a server run concurrently, each with a deadline of its own.
"""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from meshrl.common.base.errors import ConfigError, MeshError
from meshrl.common.base.files.remote_directory import RemoteDirectory, redact_url
from meshrl.job.checks.host import module_imports, programs, tokens
from meshrl.job.checks.host.error_texts import raise_combined
from meshrl.job.checks.host.rows import (
    gold_answers,
    gradable_tests,
    prompt_lengths,
    tokenized_texts,
    usable_rows,
)
from meshrl.job.checks.host.tokens import load_model_shape
from meshrl.job.hub import hub_models
from meshrl.job.job_file import MESSAGE_WITH_LOCATION, Check, JobFile
from meshrl.job.model_files import check_weights, count_parameters

GIB = 1 << 30


def check_model_files(job: JobFile) -> None:
    """Check the weights of each model; those of the Hub when they are fetched."""
    for file in job.models:
        if hub_models.has_weights(file.path):
            with job.locate_errors(file.key, MESSAGE_WITH_LOCATION):
                check_weights(file.path, load_model_shape(job, file.path))


def check_weights_quota(job: JobFile) -> None:
    """Check that the run's simultaneous versions fit in `weights.quota_gb`.

    These are the versions of the retained checkpoints, the current one, and the next.
    """
    config, allowed = job.config, job.config.weights.quota_gb
    if not allowed or config.lora.rank or not config.budget.steps:
        return
    steps, every = config.budget.steps, config.training.checkpoint_every
    retained = min(config.training.keep_checkpoints, 1 + -(-steps // every))
    versions = min(steps, retained + 2 if every > 1 else retained + 1)
    width = 2 if config.rollout.dtype == "bfloat16" else 4
    needed = versions * count_parameters(config) * width / GIB
    if needed > allowed:
        raise job.make_error(
            "weights.quota_gb",
            f"weights.quota_gb = {allowed:g} GiB is too small for the {versions} versions of "
            f"{count_parameters(config) * width / GIB:.3g} GiB that exist at a time: the "
            "retained checkpoints, the current version and the next",
            f"Set weights.quota_gb to {needed:.3g} or more, or lower training.keep_checkpoints",
        )


def check_urls_writable(job: JobFile) -> None:
    """Raise ConfigError with the server's words if a URL's files cannot be written and removed."""
    for key, place in (("out", job.config.out_url), ("weights.copies", job.config.weights.copies)):
        if place:
            _check_url_writable(job, key, place)


def _check_url_writable(job: JobFile, key: str, url: str) -> None:
    if "::" in url or redact_url(url) != url.rstrip("/"):
        raise ConfigError(  # its text does not contain the URL
            "the URL has a user, a password or a query, or is a chain of URLs (::) that may "
            "hide one; the run's files would store it",
            where=key,
            fix="Set the environment variables from which the storage's client reads credentials",
        )
    try:
        there = RemoteDirectory(url, key, "the directory")
        probe = f".probe-{uuid.uuid4().hex}"
        there.write_file(probe, b"may this host write here?")
        there.remove(probe)
    except MeshError as error:
        raise job.make_error(key, error.message, error.fix) from error


JOB_CHECKS: tuple[Check, ...] = (
    tokens.check_positions,
    tokens.check_vocabulary,
    tokens.check_stop,
    check_model_files,
    check_weights_quota,
    prompt_lengths.check_prompt_lengths,
    usable_rows.check_usable_rows,
    tokenized_texts.check_texts,
    gradable_tests.check_tests,
    gold_answers.check_golds,
    check_urls_writable,
    programs.check_packages,
    programs.check_sglang,
    programs.check_verifiers,
    programs.check_sandbox_python,
    programs.check_mcp_servers,
)


def check_host(job: JobFile, mesh_checks: tuple[Check, ...] = ()) -> None:
    """Check that the job can start, as far as this host can tell.

    `mesh_checks`: checks of the mesh that is to be started; a submitted job has a mesh. Raises the
    error of the only check that failed, or a ConfigError with the texts of all failures.
    """
    others = JOB_CHECKS + mesh_checks
    with ThreadPoolExecutor(len(others)) as pool:
        futures = [pool.submit(collect_errors, (check,), job) for check in others]
        # In this thread, which Ctrl-C interrupts: the author's code may take its time.
        own = collect_errors((module_imports.check_imports,), job)
        raise_combined([*chain.from_iterable(future.result() for future in futures), *own])


def collect_errors(checks: tuple[Check, ...], job: JobFile) -> list[MeshError]:
    """Return the errors of those checks that fail."""
    found = []
    for check in checks:
        try:
            check(job)
        except MeshError as error:
            found.append(error)
    return found
