"""Submitted job on a host that runs it: its configuration and the location of its files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from meshrl.common.job.bundle import bundle_files
from meshrl.common.job.config import JobConfig

MODULES = "modules"  # folder of a bundle with the author's code


@dataclass(frozen=True)
class JobData:
    """Submitted job: its id and configuration, and its directories."""

    id: str
    config: JobConfig
    bundle: Path  # on this host
    run_dir: Path  # on the run host, which may be another host: see `is_on_run_host`
    # Packed files, for checks at each read.
    files: bundle_files.BundleFiles = field(default_factory=dict, compare=False, repr=False)
    local_dir: Path | None = None  # for files of the run on a host without access to `run_dir`
    # the bundle's directory on the run host, if that is not `bundle`
    home_bundle: Path | None = None
    digest: str = ""  # of the bundle

    @property
    def is_on_run_host(self) -> bool:
        """True if `run_dir` is a directory of this host, or proved to be the same."""
        return self.local_dir is None

    @property
    def local_run_dir(self) -> Path:
        """Directory of this host for files of the run."""
        return self.local_dir or self.run_dir

    @property
    def shared_bundle(self) -> Path:
        """Bundle's directory under the name that is the same for all hosts."""
        return self.home_bundle or self.bundle

    @classmethod
    def from_document(cls, job: str, document: dict[str, Any], run_dir: str) -> JobData:
        """Return the job of a row in Redis, on a host where `run_dir` is local.

        The document holds the configuration and `bundle: {dir, digest, files}`. For other hosts see
        `meshrl.common.weights.store.job_files`.
        """
        values = {key: value for key, value in document.items() if key != "bundle"}
        bundle = Path(document["bundle"]["dir"])
        return cls(
            job,
            JobConfig.from_document(values),
            bundle,
            Path(run_dir),
            bundle_files.read_file_list(document),
            digest=str(document["bundle"].get("digest", "")),
        )

    def for_device(self, device: str) -> JobData:
        """Return the job for a process whose worker has this device type.

        A submitted job does not choose the devices of its mesh. Empty: no worker started the
        process.
        """
        if not device or device == self.config.mesh.device:
            return self
        mesh = replace(self.config.mesh, device="cuda" if device == "cuda" else "cpu")
        return replace(self, config=replace(self.config, mesh=mesh))

    def for_remote_host(self, bundle: Path, local_dir: Path) -> JobData:
        """Return the job for a host without access to `run_dir`."""
        return replace(self, bundle=bundle, local_dir=local_dir, home_bundle=self.bundle)

    def _checked_path(self, path: str) -> Path:
        """Return the path of a bundled file or folder; CorruptData if its contents have changed."""
        bundle_files.check_files(self.bundle, self.files, path)
        return self.bundle / path

    @property
    def modules_dir(self) -> Path:
        """Directory of the author's Python modules, which goes first on an import path.

        CorruptData if its contents have changed.
        """
        return self._checked_path(MODULES)

    @property
    def tokenizer_file(self) -> Path:
        """Bundled tokenizer.json, in a folder with its companion files.

        CorruptData if their contents have changed.
        """
        name = self.config.model.tokenizer or "tokenizer.json"
        self._checked_path(name.rpartition("/")[0] or name)  # its folder, if it is in one
        return self.bundle / name

    @property
    def initial_model_dir(self) -> Path | None:
        """Bundled Hugging Face directory with the initial model; None: from scratch.

        CorruptData if its contents have changed, as far as can be checked without reading weights.
        """
        path = self.config.model.path
        return self._checked_path(path) if path else None

    def get_frozen_model_dir(self, role: str) -> Path:
        """Return the directory of a frozen model that was given as files.

        CorruptData as for `initial_model_dir`.
        """
        path: str = getattr(self.config.models, role).path
        return self._checked_path(path)

    def read_rows(self, split: str) -> list[dict[str, Any]]:
        """Return the rows of `train` or `held_out`; none if the job names no such file."""
        if split == "train":
            return list(chain.from_iterable(self.read_training_sources()))
        return self.read_file_rows(getattr(self.config.dataset, split))

    def read_training_sources(self) -> list[list[dict[str, Any]]]:
        """Return the training rows of each source."""
        return [self.read_file_rows(path) for path in self.config.dataset.trained_paths]

    def read_file_rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a file of the bundle; none without a name.

        CorruptData if the file has changed.
        """
        if not name:
            return []
        with self._checked_path(name).open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]
