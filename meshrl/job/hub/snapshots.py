"""Commits and files of the Hub's repositories, and copies of them in the Hub's cache."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name

from meshrl.common.base.files import documents
from meshrl.job.hub import hub_errors
from meshrl.job.hub.repository import Repository

NOTICE_BYTES = 64 << 20  # of a download that is told also without a terminal


@dataclass(frozen=True)
class Snapshot:
    """Files of a repository at a commit."""

    repository: Repository
    commit: str
    sizes: Mapping[str, int]  # path -> bytes of each file
    is_listed: bool = True  # False: the Hub is unreachable, and the files are those in the cache
    # (configuration, split) -> files, of the splits that were looked up so far
    splits: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        """Directory of the commit's files in the Hub's cache."""
        return _find_cache_directory(self.repository) / "snapshots" / self.commit

    def fetch(self, names: Iterable[str]) -> Path:
        """Fetch the files that the cache lacks; return the directory.

        Raises ConfigError with what to do when that fails. A second call continues.
        """
        repository = self.repository
        missing = [name for name in names if not (self.directory / name).is_file()]
        size_bytes = sum(self.sizes.get(name, 0) for name in missing)
        if missing:
            self._check_disk_space(size_bytes)
        if size_bytes > NOTICE_BYTES:
            size = hub_errors.format_size(size_bytes)
            print(f"fetching {size} of {repository.id} from the Hub", file=sys.stderr, flush=True)
        for name in missing:
            with hub_errors.explain_errors(repository, name):
                hf_hub_download(
                    repository.id,
                    name,
                    repo_type=repository.kind,
                    revision=self.commit,
                    etag_timeout=hub_errors.REQUEST_TIMEOUT_S,
                )
        return self.directory

    def _check_disk_space(self, size_bytes: int) -> None:
        """Raise ConfigError if the disk of the cache has no room for further files."""
        cached = _find_cache_directory(self.repository)
        needed = size_bytes - sum(f.stat().st_size for f in cached.glob("blobs/*.incomplete"))
        place = next(p for p in (cached, *cached.parents) if p.is_dir())
        free = shutil.disk_usage(place).free
        if needed > free:
            raise hub_errors.make_disk_error(self.repository, needed, free)


@cache
def open_snapshot(repository: Repository) -> Snapshot:
    """Return the commit and files of a repository; of an unreachable Hub, those in the cache.

    The answer is kept until `cache_clear`, so that a job sees one commit of a branch. Raises
    ConfigError, whose `where` is the key of a wrong revision.
    """
    try:
        api = HfApi()
        info = (api.model_info if repository.kind == "model" else api.dataset_info)(
            repository.id,
            revision=repository.named_revision,
            timeout=hub_errors.REQUEST_TIMEOUT_S,
            files_metadata=True,
        )
    except hub_errors.HUB_ERRORS as error:
        if not hub_errors.is_unreachable(error):
            raise hub_errors.explain_error(repository, error) from error
        return _open_cached_snapshot(repository, error)
    commit = str(info.sha)
    if repository.named_revision != commit:  # so that the cache alone has the branch's commit
        ref = _find_cache_directory(repository) / "refs" / repository.named_revision
        with hub_errors.explain_errors(repository, "its commit"):
            ref.parent.mkdir(parents=True, exist_ok=True)
            documents.write_bytes(ref, commit.encode(), durable=False)
    files = [file for file in info.siblings or () if _is_plain(file.rfilename)]
    return Snapshot(repository, commit, {file.rfilename: file.size or 0 for file in files})


def _open_cached_snapshot(repository: Repository, why: Exception) -> Snapshot:
    """Return the snapshot that the cache has of a repository of an unreachable Hub."""
    try:
        found = snapshot_download(
            repository.id,
            repo_type=repository.kind,
            revision=repository.named_revision,
            local_files_only=True,
            allow_patterns=[],  # no file must be complete
        )
    except LocalEntryNotFoundError:
        raise hub_errors.explain_error(repository, why) from why
    directory = Path(found)
    names = [p.relative_to(directory) for p in directory.rglob("*") if p.is_file()]
    print(
        f"{repository.id}: {hub_errors.explain_unreachable(why)}; its cached commit "
        f"{directory.name[:12]} is used",
        file=sys.stderr,
    )
    sizes = {name.as_posix(): (directory / name).stat().st_size for name in names}
    return Snapshot(repository, directory.name, sizes, is_listed=False)


def _is_plain(name: str) -> bool:
    """Return True if a path of a repository stays below its directory."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _find_cache_directory(repository: Repository) -> Path:
    folder = repo_folder_name(repo_id=repository.id, repo_type=repository.kind)
    return Path(constants.HF_HUB_CACHE).expanduser().absolute() / folder
