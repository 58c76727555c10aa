"""A submitted job on the host that runs it: its configuration, and where its files lie here."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshrl.common.job.bundle import bundle_files
from meshrl.common.job.config import JobConfig

MODULES = "modules"  # the folder of a bundle with the author's code


@dataclass(frozen=True)
class JobData:
    """A submitted job: its id and configuration, and its directories."""

    id: str
    config: JobConfig
    bundle: Path  # on this host
    run_dir: Path  # where the run is at home, perhaps on another host: see `at_home`
    # What was packed, to check by what is read.
    files: bundle_files.BundleFiles = field(default_factory=dict, compare=False, repr=False)
    local_dir: Path | None = (
        None  # where a host that does not see `run_dir` keeps its files of the run
    )
    home_bundle: Path | None = None  # where the bundle is at home, if that is not `bundle`
    digest: str = ""  # of the bundle

    @property
    def is_on_run_host(self) -> bool:
        """Whether `run_dir` is a directory of this host, or proved to be the same."""
        return self.local_dir is None

    @property
    def local_run_dir(self) -> Path:
        """The directory of this host for files of the run."""
        return self.local_dir or self.run_dir

    @property
    def shared_bundle(self) -> Path:
        """The bundle's directory by the name that everybody knows it by."""
        return self.home_bundle or self.bundle

    @classmethod
    def from_document(cls, job: str, document: dict[str, Any], run_dir: str) -> JobData:
        """The job of a row in Redis, whose document holds the configuration and `bundle: {dir,
        digest, files}`, on a host where `run_dir` is at home; elsewhere see `local_files`.
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
        """The job as a process computes it whose worker is of `device`: a job that is submitted
        does not choose what the workers of its mesh are. Empty: no worker has started the process.
        """
        if not device or device == self.config.mesh.device:
            return self
        mesh = replace(self.config.mesh, device="cuda" if device == "cuda" else "cpu")
        return replace(self, config=replace(self.config, mesh=mesh))

    def for_remote_host(self, bundle: Path, local_dir: Path) -> JobData:
        """The same on a host that does not see `run_dir`."""
        return replace(self, bundle=bundle, local_dir=local_dir, home_bundle=self.bundle)

    def _checked_path(self, path: str) -> Path:
        """A file or folder of the bundle; Damaged if it is not what was packed."""
        bundle_files.check_files(self.bundle, self.files, path)
        return self.bundle / path

    @property
    def modules_dir(self) -> Path:
        """Directory of the author's Python modules, which goes first on an import path. Damaged."""
        return self._checked_path(MODULES)

    @property
    def tokenizer_file(self) -> Path:
        """The bundled tokenizer.json; beside it lie the files that belong to it. Damaged."""
        name = self.config.model.tokenizer or "tokenizer.json"
        self._checked_path(name.rpartition("/")[0] or name)  # its folder, if it lies in one
        return self.bundle / name

    @property
    def initial_model_dir(self) -> Path | None:
        """The bundled Hugging Face directory that the model begins from; None: from scratch.
        Damaged, as far as that shows without reading weights.
        """
        path = self.config.model.path
        return self._checked_path(path) if path else None

    def get_frozen_model_dir(self, role: str) -> Path:
        """Where a frozen model of the job lies, if it was given as files. Damaged, as `origin`."""
        path: str = getattr(self.config.models, role).path
        return self._checked_path(path)

    def read_rows(self, split: str) -> list[dict[str, Any]]:
        """The rows of `train` or `held_out`; none when the job names no such file."""
        return self.read_file_rows(getattr(self.config.dataset, split))

    def read_file_rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a file of the bundle; none without a name. Damaged."""
        if not name:
            return []
        with self._checked_path(name).open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]
