"""Repositories of the Hub that a job names: files for its checks, weights, and commits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import JobConfig, ModelsConfig
from meshrl.common.job.named_files import list_named_files, set_value
from meshrl.job import model_files
from meshrl.job.hub import hub_models
from meshrl.job.hub.repository import Repository, is_hub_id, parse_snapshot_path
from meshrl.job.job_file import MESSAGE_WITH_LOCATION, JobFile, get_value
from meshrl.job.row_files import repository_layout
from meshrl.job.row_files.data_source import list_sources


def forget_commits() -> None:
    """Forget the commits of branches, before another job is read."""
    if snapshots := sys.modules.get("meshrl.job.hub.snapshots"):
        snapshots.open_snapshot.cache_clear()


def resolve_models(job: JobFile) -> JobFile:
    """Return the job with the directory in the Hub's cache, and the commit, of each Hub model.

    The directory has no weights yet: `fetch_weights` fetches them.
    """
    document = job.config.to_document()
    for table in ("model", *(f"models.{role.name}" for role in fields(ModelsConfig))):
        path_key, key = f"{table}.path", f"{table}.revision"
        path, revision = get_value(job.config, path_key), get_value(job.config, key)
        if not is_hub_id(path):
            if revision and not parse_snapshot_path(path):
                given = "a path" if path else "empty"
                wrong = f"{key} needs a Hub id in {path_key}, which is {given}"
                raise job.make_error(key, wrong, "Remove the key")
            continue
        try:
            directory = hub_models.fetch_description(
                Repository(path, "model", revision, path_key, key)
            )
        except ConfigError as error:
            message = error.message if error.where else f"{path_key}: {error.message}"
            raise job.make_error(error.where or path_key, message, error.fix) from error
        set_value(document, path_key, str(directory))
        set_value(document, key, directory.name)
    return job.with_config(JobConfig.from_document(document))


def fetch_weights(job: JobFile) -> None:
    """Fetch and check the weights of a resolved job's Hub models.

    Raises ConfigError with what to do. A second call continues.
    """
    for file in job.models:
        if not hub_models.has_weights(file.path):
            with job.locate_errors(file.key, MESSAGE_WITH_LOCATION):
                hub_models.fetch_weights(file.path, file.key)
                model_files.check_weights(file.path, model_files.load_shape_from(file.path, {}))


def find_origins(config: JobConfig) -> dict[str, dict[str, str]]:
    """Return the repository and commit of each key of a resolved job that names a Hub id."""
    return {
        key: {"repository": repository.id, "commit": repository.revision}
        for key, repository in _iterate_origins(config)
    }


def restore_ids(config: JobConfig) -> JobConfig:
    """Return a resolved job with Hub ids and commits, so that another host can read it."""
    document = config.to_document()
    for file in list_named_files(config):
        if file.is_model and (repository := parse_snapshot_path(file.path)):
            set_value(document, file.key, repository.id)
    pin_datasets(config, document)
    return JobConfig.from_document(document)


def pin_datasets(config: JobConfig, document: dict[str, Any]) -> None:
    """Set the revisions of Hub datasets in a document of the job to their commits.

    A table whose datasets are in several repositories keeps its revision.
    """
    commits: dict[str, set[str]] = {}
    for source in list_sources(config):
        if is_hub_id(source.path):
            of_table = commits.setdefault(source.get_option_key("revision"), set())
            of_table.add(repository_layout.find_commit(source).revision)
    for key, found in commits.items():
        if len(found) == 1:
            set_value(document, key, *found)


def _iterate_origins(config: JobConfig) -> Iterator[tuple[str, Repository]]:
    """Yield the job key and the repository at its commit of each Hub id."""
    for file in list_named_files(config):
        if file.is_model and (repository := parse_snapshot_path(file.path)):
            yield file.key, repository
    for source in list_sources(config):
        if is_hub_id(source.path):
            yield source.key, repository_layout.find_commit(source)
