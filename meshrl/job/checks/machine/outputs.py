"""Whether what a run makes can be put where its job names, in `out` and `weights.copies`."""

from __future__ import annotations

import uuid

from meshrl.common.base.errors import ConfigError, MeshError
from meshrl.common.base.files.at_url import AtUrl, without_secrets
from meshrl.job.loaded import JobFile


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
