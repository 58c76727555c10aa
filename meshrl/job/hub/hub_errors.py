"""Errors of the Hub and of downloads, as errors of the job key that names the repository."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import HfApi, constants, get_session, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from meshrl.common.base.errors import ConfigError
from meshrl.job.hub.repository import Repository

REQUEST_TIMEOUT_S = 15.0  # for the answer of a request; a stalled download ends after 10 s
HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]  # base of the HTTP client's errors
HUB_ERRORS = (HTTP_ERROR, OSError, ValueError)  # ValueError: an invalid id, or no JSON
REPEAT_FIX = "Repeat the command: it continues where the download stopped"
TOKEN_FIX = "set HF_TOKEN, or run `hf auth login`"
BUSY_STATUS, SERVER_ERROR_STATUS = 429, 500
MAX_LISTED_REFS = 12


@contextmanager
def explain_errors(repository: Repository, file: str) -> Iterator[None]:
    """Raise the ConfigError of an error of the Hub or disk while a file is fetched."""
    try:
        yield
    except (*HUB_ERRORS, RuntimeError) as error:  # RuntimeError: of hf_xet
        raise explain_error(repository, error, file) from error


def is_unreachable(error: Exception) -> bool:
    """Return True if the Hub did not answer, or is too busy to."""
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return status == BUSY_STATUS or status >= SERVER_ERROR_STATUS
    return isinstance(error, HTTP_ERROR | OfflineModeIsEnabled)


def explain_unreachable(error: Exception) -> str:
    """Return why there is no answer of the Hub."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE forbids requests to the Hub"
    if not isinstance(error, HfHubHTTPError):
        return f"{constants.ENDPOINT} does not answer ({str(error) or type(error).__name__})"
    status = error.response.status_code
    if status != BUSY_STATUS:
        return f"{constants.ENDPOINT} answered with the error {status}"
    wait = error.response.headers.get("Retry-After", "")
    return "the Hub's rate limit is reached" + (f"; it asks to wait {wait} s" if wait else "")


def explain_error(repository: Repository, error: Exception, file: str = "") -> ConfigError:
    """Return the error of the job key that names a repository."""
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, HUB_ERRORS):
        error = error.__cause__
    if isinstance(error, GatedRepoError):
        return _explain_gate(repository, error)
    if isinstance(error, RevisionNotFoundError):
        return _explain_revision(repository)
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return _explain_repository(repository)
    if isinstance(error, EntryNotFoundError):
        return _make_error(repository, f"the Hub has no file {file}", "Check the revision")
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        return _make_error(
            repository,
            "the Hub rejects the token of this host",
            f"Create a token that may read the repository, and {TOKEN_FIX}",
        )
    if is_unreachable(error):
        what = f"the download of {file} ended"
        if not file:
            what = "it is neither a path here nor in the Hub's cache"
        kind = " --repo-type dataset" if repository.kind == "dataset" else ""
        copy = f"run `hf download {repository.id}{kind}` on another host, and copy the Hub's cache"
        return _make_error(
            repository,
            f"{explain_unreachable(error)}, and {what}",
            f"Unset the variable, or {copy}"
            if isinstance(error, OfflineModeIsEnabled)
            else f"{REPEAT_FIX if file else 'Check the network'}. Without a network, {copy}",
        )
    text = " ".join(str(error).split())
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text:
        return make_disk_error(repository, None, 0)
    if file:
        return _make_error(repository, f"{file} could not be fetched: {text}", REPEAT_FIX)
    wrong = f"{constants.ENDPOINT} does not answer as the Hub does: {text}"
    return _make_error(repository, wrong, "Check HF_ENDPOINT and the proxy of this host")


def make_disk_error(repository: Repository, needed: int | None, free: int) -> ConfigError:
    """Return the error of a disk without room for a repository; `needed` None: while fetching."""
    place = constants.HF_HUB_CACHE
    amount = (
        f"it needs {format_size(needed)} in {place}, where {format_size(free)} are free"
        if needed is not None
        else f"the disk of {place} became full"
    )
    return _make_error(
        repository,
        amount,
        "Free space (`hf cache ls` lists what is cached), or set HF_HOME to a directory on a "
        "larger disk. The next attempt continues the download",
    )


def format_size(size_bytes: float) -> str:
    """Return a size in kB, MB or GB."""
    unit, divisor = next(u for u in (("GB", 1e9), ("MB", 1e6), ("kB", 0)) if size_bytes >= u[1])
    return f"{size_bytes / (divisor or 1e3):.1f} {unit}"


def _make_error(repository: Repository, message: str, fix: str, where: str = "") -> ConfigError:
    return ConfigError(f"{repository.id}: {message}", fix=fix, where=where)


def _explain_gate(repository: Repository, error: GatedRepoError) -> ConfigError:
    page = _get_page(repository)
    if get_token() is None:
        return _make_error(
            repository,
            "the repository is gated, and this host has no token",
            f"Request access on {page}, and {TOKEN_FIX}",
        )
    return _make_error(
        repository,
        "the repository is gated, and the user of this host's token has no access",
        f"Request access on {page}, or use the token of a user with access: {TOKEN_FIX}",
    )


def _explain_revision(repository: Repository) -> ConfigError:
    key, names = repository.revision_key, _list_refs(repository)
    listed = ", ".join(names[:MAX_LISTED_REFS]) + (", ..." if len(names) > MAX_LISTED_REFS else "")
    has = f"; it has {listed}" if names else ""
    return ConfigError(
        f"{key} = {repository.revision!r}: {repository.id} has no such revision{has}",
        fix=f"Set {key} to a branch, a tag or a commit of 40 digits, or remove it for main",
        where=key,
    )


def _list_refs(repository: Repository) -> list[str]:
    """Return the branches and tags of a repository; none if the Hub does not list them."""
    try:
        answer = get_session().get(
            f"{constants.ENDPOINT}/api/{repository.kind}s/{repository.id}/refs",
            headers=build_hf_headers(),
            timeout=REQUEST_TIMEOUT_S,
        )
        refs: dict[str, Any] = answer.raise_for_status().json()
    except HUB_ERRORS:
        return []
    return [ref["name"] for kind in ("branches", "tags") for ref in refs.get(kind, [])]


def _explain_repository(repository: Repository) -> ConfigError:
    """Return the error of an id that is neither a path nor a repository of its kind."""
    other = "dataset" if repository.kind == "model" else "model"
    try:
        HfApi().repo_info(repository.id, repo_type=other, timeout=REQUEST_TIMEOUT_S)
    except HUB_ERRORS:
        return ConfigError(
            f"{repository.id} is no path here, and no {repository.kind} of the Hub that "
            f"{'this token' if get_token() else 'a host without a token'} can read",
            fix=f"Correct the path or the id; for a private repository, {TOKEN_FIX}",
        )
    return _make_error(
        repository,
        f"the repository is a {other} of the Hub, not a {repository.kind}",
        f"Set {repository.key} to the id of a {repository.kind}",
    )


def _get_page(repository: Repository) -> str:
    folder = "datasets/" if repository.kind == "dataset" else ""
    return f"{constants.ENDPOINT}/{folder}{repository.id}"
